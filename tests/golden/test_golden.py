"""Today's weights are those on record, bit for bit, and checkpoints of long ago resume to them.

Other tests compare one run with another, and both might move together. ``make golden`` runs these
on 1, 2 and 3 ranks; it has the libraries compute alike on all processors.
"""

import functools
import importlib
import json
import shutil
from pathlib import Path

import pytest
from ranks import shared_folder
from trainings import CASES, SAVED_AT, difference, of_all_ranks

import hvkit

HERE = Path(__file__).parent
MODES = [("torch", "eager"), ("keras", "eager"), ("keras", "graph")]
SAVED = [
    *(case for case in CASES if case.compression == "none" and not case.options),
    *(case for case in CASES if case.name in ("Synchronous | TopK", "Synchronous | PowerSGD")),
    *(case for case in CASES if case.name in ("LocalSGD | int8", "DiLoCo, overlap | TopK")),
]


class Records:
    """Records by name, in a file for each framework and number of ranks."""

    def __init__(self, framework):
        self._file = HERE / "weights" / f"{framework}-on-{hvkit.size()}.json"
        self._known = json.loads(self._file.read_text()) if self._file.exists() else {}

    def __getitem__(self, name):
        return self._known[name]

    def of(self, name):
        """The names of the records of one training."""
        return {each for each in (name, f"{name} | settled") if each in self._known}

    def renew(self, name, value):
        """Write one anew; rank 0 prints how it differs."""
        if hvkit.is_main():
            was = self._known.get(name)
            if was != value:
                print(f"\n{name}: {difference(value, was) if was else 'new'}")
        self._known[name] = value
        if hvkit.is_main():
            lines = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(self._known.items()))
            self._file.parent.mkdir(exist_ok=True)
            self._file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


@pytest.fixture(scope="module", params=MODES, ids=" ".join)
def where(request):
    """The framework, and whether its steps run in graphs."""
    return request.param


@pytest.fixture(scope="module")
def records(where):
    return Records(where[0])


@pytest.fixture
def make(where):
    """Makes a training from a case, and a folder for its checkpoints if it has one."""
    module = importlib.import_module(f"{where[0]}_training")
    yield functools.partial(module.Training, mode=where[1])
    module.clean_up()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_weights_are_those_on_record(case, where, make, records, request):
    name = name_of(case, where)
    try:
        training = make(case)
    except (TypeError, ValueError):  # by distribute; training that fails is a failure
        found = {name: ["refused"]}
    else:
        found = {name: of_all_ranks(training.train().weights())}
        with hvkit.settled(training.model, training.optimizer):
            settled = of_all_ranks(training.weights())
        if settled != found[name]:
            found[f"{name} | settled"] = settled
    renewed = request.config.option.renew
    for each, value in found.items():
        if renewed is not None and renewed in each:
            records.renew(each, value)
    # A name without "settled" is that of weights that are settled anyway.
    assert found.keys() == records.of(name), "other weights are settled"
    for each, value in found.items():
        assert value == records[each], f"{each} differs by {difference(value, records[each])}"


@pytest.mark.skipif(hvkit.size() != 2, reason="the checkpoints are those of two ranks")
@pytest.mark.parametrize("case", SAVED, ids=lambda case: case.name)
def test_checkpoints_of_long_ago_resume_to_the_weights_on_record(
    case, where, make, records, request, tmp_path_factory
):
    name = name_of(case, where)
    if records[name] == ["refused"]:
        pytest.skip("there is no such training")
    if where == ("keras", "eager"):
        pytest.skip("the files are those of graphs")
    saved = HERE / "checkpoints" / f"{where[0]} {case.name.replace(' | ', ' ')}"
    if request.config.option.renew is not None and not hvkit.broadcast(saved.exists()):
        training = make(case, folder=saved).train(SAVED_AT)
        training.checkpoint.save(epoch=0, step=SAVED_AT)
    folder = shared_folder(tmp_path_factory)
    if hvkit.is_main():
        shutil.copytree(saved, folder, dirs_exist_ok=True)
    hvkit.barrier()
    training = make(case, folder=folder)
    assert training.done == SAVED_AT
    assert of_all_ranks(training.train().weights()) == records[name]


def name_of(case, where):
    return f"{case.name} | {where[1]}"
