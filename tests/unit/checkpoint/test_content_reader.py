import io
import zipfile

import numpy as np
import pytest

from hvkit.checkpoint.saved_object import ContentReader


@pytest.fixture
def file():
    return ContentReader(memoryview(b"0123456789"))


def test_it_reads_as_any_file(file):
    assert file.read(3) == b"012"
    assert file.seek(-2, io.SEEK_END) == 8
    assert file.read() == b"89"
    assert file.read(1) == b""
    file.seek(2)
    assert file.seek(3, io.SEEK_CUR) == file.tell() == 5
    into = bytearray(4)
    assert file.readinto(into) == 4
    assert into == b"5678"


def test_archives_open_in_it():
    written = io.BytesIO()
    np.savez(written, x=np.arange(1000))
    file = ContentReader(memoryview(written.getvalue()))
    assert zipfile.is_zipfile(file)
    with np.load(file) as values:
        assert (values["x"] == np.arange(1000)).all()
