"""An image as build_image.py leaves it."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True)
class Image:
    """A built image: its file system, and its configuration as Docker has it."""

    root: Path
    config: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        return self.config["config"]

    @property
    def environ(self) -> dict[str, str]:
        return dict(entry.split("=", 1) for entry in self.settings["Env"])

    def files(self) -> list[Path]:
        """All files, but no links; a link could lead out of the image."""
        return [
            path
            for folder, _, names in os.walk(self.root)
            for name in names
            if (path := Path(folder, name)).is_file() and not path.is_symlink()
        ]

    def inside(self, path: Path) -> str:
        """The path as it is called in the image."""
        return f"/{path.relative_to(self.root)}"

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The image in a folder that build_image.py has filled."""
        manifest = json.loads((folder / "image/manifest.json").read_text())
        config = folder / "image" / manifest["config"]["digest"].removeprefix("sha256:")
        return cls(folder / "rootfs", json.loads(config.read_text()))
