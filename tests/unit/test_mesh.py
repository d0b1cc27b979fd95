"""Ranks in a mesh: who stands where, and who belongs together."""

import pytest

from hvkit.mesh import Mesh, MeshPosition, picture, position_in, rows


@pytest.mark.parametrize(
    ("mesh", "size", "filled"),
    [
        (Mesh(pipeline=2), 8, Mesh(data=4, pipeline=2)),
        (Mesh(data=2, tensor=-1), 8, Mesh(data=2, tensor=4)),
        (Mesh(data=1, shard=-1, pipeline=3), 6, Mesh(data=1, shard=2, pipeline=3)),
        (Mesh(), 5, Mesh(data=5)),
    ],
)
def test_an_open_axis_gets_the_ranks_that_are_left(mesh, size, filled):
    assert mesh.filled(size) == filled


@pytest.mark.parametrize(("mesh", "size"), [(Mesh(pipeline=3), 8), (Mesh(2, 2, 2), 4)])
def test_a_mesh_of_another_number_of_ranks_is_refused(mesh, size):
    with pytest.raises(ValueError, match=f"there are {size}: choose axes whose product is {size}"):
        mesh.filled(size)


@pytest.mark.parametrize(
    ("axes", "error", "text"),
    [
        ({"pipeline": 2.0}, TypeError, "pipeline of a Mesh must be an int, got 2.0"),
        ({"tensor": 0}, ValueError, "tensor of a Mesh must be a positive number of ranks"),
        ({"data": -2}, ValueError, "data of a Mesh must be a positive number of ranks"),
        ({"tensor": -1}, ValueError, "data and tensor of a Mesh are -1"),
    ],
)
def test_wrong_axes_are_refused(axes, error, text):
    with pytest.raises(error, match=text):
        Mesh(**axes)


def test_the_tensor_axis_changes_fastest():
    mesh = Mesh(data=2, shard=1, pipeline=2, tensor=2)
    places = [MeshPosition(mesh, rank) for rank in range(8)]
    assert [each.along("tensor") for each in places] == [0, 1] * 4
    assert [each.along("pipeline") for each in places] == [0, 0, 1, 1] * 2
    assert [each.along("data") for each in places] == [0] * 4 + [1] * 4
    assert rows(mesh, "tensor") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert rows(mesh, "data") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert rows(mesh, "pipeline", "tensor") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert MeshPosition(mesh, 6).members("pipeline") == (4, 6)


def test_data_and_shard_divide_a_batch():
    mesh = Mesh(data=2, shard=3, tensor=2)
    places = [MeshPosition(mesh, rank) for rank in range(12)]
    assert [each.batch for each in places] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert {each.batches for each in places} == {6}


def test_the_picture():
    mesh = Mesh(data=2, pipeline=2, tensor=2)
    assert picture(mesh, ["one"] * 8) == (
        "8 ranks: data 2 x pipeline 2 x tensor 2\n"
        "            stage 0  stage 1\n"
        "    data 0  0 1      2 3\n"
        "    data 1  4 5      6 7"
    )
    assert "data 1  2 on b" in picture(Mesh(data=2, pipeline=2), ["a", "a", "b", "b"])


def test_one_process_has_all_of_the_model():
    assert position_in(Mesh(pipeline=4)) == MeshPosition(Mesh(data=1), 0)
    with pytest.raises(TypeError, match=r"mesh must be a hvkit\.Mesh"):
        position_in({"pipeline": 2})
