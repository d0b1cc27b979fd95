"""Wheels of Horovod without Horovod."""

import zipfile

from hvkit.build.wheels import FILE


def wheel_of(abi, folder, version, **libraries):
    """Write a wheel with these facts, and libraries by the folder that they are in."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"horovod-{version}-cp311-cp311-{abi.platform}.whl"
    about = f"horovod-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("horovod/__init__.py", "")
        wheel.writestr("horovod/metadata.json", "{}")
        wheel.writestr(f"horovod/{FILE}", abi.text)
        for name, data in libraries.items():
            wheel.writestr(f"horovod/{name}/mpi_lib.so", data)
        wheel.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: horovod\nVersion: {version}\n\nText"
        )
        wheel.writestr(f"{about}/WHEEL", f"Wheel-Version: 1.0\nTag: cp311-cp311-{abi.platform}\n")
        wheel.writestr(f"{about}/RECORD", "")
    return path
