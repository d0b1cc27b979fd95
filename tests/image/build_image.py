"""Build the image without a daemon, as root, and leave it as files for the tests.

::

    python tests/image/build_image.py build/image

The base is a minimal Debian made by mmdebstrap, which has no Python but, as Ubuntu's images, a
user 1000. buildah builds in its chroot isolation, with pip's settings of this machine passed as
secrets. The folder then holds

- ``rootfs``, the image's file system;
- ``image``, its configuration, manifest and compressed layers, one file each;
- ``storage``, what buildah keeps so that the next build starts from it. Remove it to build anew.

Time and sizes are printed at the end.
"""

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pip_settings import PipSettings, pip_settings

_CHECKOUT = Path(__file__).parents[2]
_SUITE = "bookworm"
_BASE = f"localhost/{_SUITE}"
_IMAGE = "localhost/hvkit"
_HOOKS = (
    # mmdebstrap leaves this machine's own there.
    'rm -f "$1"/etc/hostname "$1"/etc/resolv.conf',
    # As in Ubuntu's images.
    'chroot "$1" useradd --uid 1000 --create-home ubuntu',
)
_TOOLS = ("buildah", "mmdebstrap")
_MIB = 1024**2


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the image is left, some 11 GiB")
    parser.add_argument(
        "--build-arg", action="append", default=[], metavar="NAME=VALUE", help="for the Dockerfile"
    )
    args = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("buildah's chroot isolation needs root")
    for tool in _TOOLS:
        if shutil.which(tool) is None:
            parser.error(f"{tool} is not on PATH: apt-get install {tool}")
    build(args.folder.absolute(), args.build_arg)


def build(folder: Path, build_args: list[str]) -> None:
    """Build the image and leave it in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    buildah = Buildah(folder / "storage")
    started = time.monotonic()
    if not buildah.has(_BASE):
        _make_base(buildah)
    based = time.monotonic()
    with _options(pip_settings()) as options:
        args = [f"--build-arg={each}" for each in (f"BASE_IMAGE={_BASE}", *build_args)]
        # The format of OCI has no HEALTHCHECK.
        kind = ["--isolation=chroot", "--format=docker", "--layers", f"--tag={_IMAGE}"]
        buildah("bud", *kind, *args, *options, str(_CHECKOUT))
    built = time.monotonic()
    _export(buildah, folder)
    buildah.close()
    _report(folder, based - started, built - based)


class Buildah:
    """The command, with a storage of its own."""

    def __init__(self, storage: Path) -> None:
        places = {name: storage / name for name in ("root", "runroot", "tmp")}
        for place in places.values():
            place.mkdir(parents=True, exist_ok=True)
        self._storage = places["root"]
        self._command = ["buildah", f"--root={places['root']}", f"--runroot={places['runroot']}"]
        # The caches that a Dockerfile mounts are kept there.
        self._environ = os.environ | {"TMPDIR": str(places["tmp"])}

    def __call__(self, *arguments: str) -> None:
        """Run it; what it prints is shown."""
        subprocess.run([*self._command, *arguments], env=self._environ, check=True)

    def output(self, *arguments: str) -> str:
        """Run it and return what it prints."""
        done = subprocess.run(
            [*self._command, *arguments],
            env=self._environ,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        return done.stdout.strip()

    def has(self, image: str) -> bool:
        """Whether the storage has an image of that name."""
        images = json.loads(self.output("images", "--json") or "null") or []
        return any(f"{image}:latest" in (one.get("names") or []) for one in images)

    def close(self) -> None:
        """Unmount what it keeps mounted, so that the storage can be removed."""
        for place in self._storage.iterdir():
            if place.is_mount():
                subprocess.run(["umount", str(place)], check=True)


def _make_base(buildah: Buildah) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        archive = Path(scratch, "base.tar")
        hooks = [f"--customize-hook={hook}" for hook in _HOOKS]
        command = ["mmdebstrap", "--variant=minbase", *hooks, _SUITE, str(archive)]
        subprocess.run(command, check=True)
        container = buildah.output("from", "scratch")
        buildah("add", "--quiet", container, str(archive), "/")
    buildah("commit", "--quiet", "--rm", container, _BASE)


@contextmanager
def _options(settings: PipSettings) -> Iterator[list[str]]:
    """What lets a build find packages where this machine finds them."""
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        file.write(settings.text)
        file.flush()
        options = [f"--secret=id=pip_conf,src={file.name}"]
        if settings.certificates:
            options.append(f"--secret=id=ca_bundle,src={settings.certificates}")
        options += [f"--volume={folder}:{folder}:ro" for folder in settings.folders]
        yield options


def _export(buildah: Buildah, folder: Path) -> None:
    for name in ("rootfs", "image"):
        shutil.rmtree(folder / name, ignore_errors=True)
    buildah("push", "--quiet", "--format=v2s2", _IMAGE, f"dir:{folder / 'image'}")
    container = buildah.output("from", _IMAGE)
    try:
        mounted = buildah.output("mount", container)
        subprocess.run(["cp", "--archive", mounted, str(folder / "rootfs")], check=True)
    finally:
        buildah("rm", container)


def _report(folder: Path, base_seconds: float, build_seconds: float) -> None:
    manifest = json.loads((folder / "image/manifest.json").read_text())
    config = json.loads((folder / "image" / _file_of(manifest["config"])).read_text())
    steps = [step["created_by"] for step in config["history"] if not step.get("empty_layer")]
    used = subprocess.run(
        ["du", "--summarize", "--block-size=1M", str(folder / "rootfs")],
        check=True,
        capture_output=True,
        text=True,
    )
    print(f"base: {base_seconds:.0f} s, image: {build_seconds:.0f} s; load {os.getloadavg()}")
    print(f"file system: {used.stdout.split()[0]} MiB; layers, compressed:")
    for layer, step in zip(manifest["layers"], steps, strict=True):
        print(f"{layer['size'] / _MIB:8.1f} MiB  {' '.join(step.split())[:90]}")
    print(f"{sum(layer['size'] for layer in manifest['layers']) / _MIB:8.1f} MiB  in all")


def _file_of(descriptor: dict[str, str]) -> str:
    return descriptor["digest"].removeprefix("sha256:")


if __name__ == "__main__":
    main()
