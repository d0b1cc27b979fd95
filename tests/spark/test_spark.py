"""``hvkit.spark.run`` on real Spark: two executors, which one session starts for all tests."""

import os
import runpy
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import psutil
import pytest
from pyspark import SparkFiles
from pyspark.sql import SparkSession
from test_docs import scripts

import hvkit
import hvkit.spark
from hvkit.errors import LaunchError
from hvkit.spark import job
from hvkit.spark.task import Front, RankPosition, Store, _interface, positions

LOOPBACK = "127.0.0.1"
SPARKS = "org.apache.spark.SparkException: "


@pytest.fixture(scope="module")
def spark():
    # For the executors, which inherit it.
    os.environ |= {"SPARK_LOCAL_IP": LOOPBACK, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}
    settings = {
        "spark.driver.host": LOOPBACK,
        "spark.driver.bindAddress": LOOPBACK,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
    }
    session = SparkSession.builder.master("local-cluster[2,1,1024]").config(map=settings)
    session = session.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


@pytest.fixture(scope="module")
def table(spark, tmp_path_factory):
    """Parquet files that Spark has written: y = 2 a - b, in 64 rows."""
    folder = str(tmp_path_factory.mktemp("data") / "table")
    rows = spark.range(64).selectExpr("sin(id) AS a", "cos(3 * id) AS b")
    rows = rows.selectExpr("array(a, b) AS x", "2 * a - b AS y")
    rows.repartition(2).write.parquet(folder)
    return folder


def train(table, *, epochs, strategy):
    import pyarrow.dataset
    import torch

    rows = hvkit.shard(pyarrow.dataset.dataset(table), seed=1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = hvkit.distribute(model, optimizer, strategy=strategy)
    batches = rows.batches(8)
    for _ in range(epochs):
        for batch in batches:
            x, y = (torch.tensor(batch[name], dtype=torch.float32) for name in "xy")
            optimizer.zero_grad()
            (model(x)[:, 0] - y).square().mean().backward()
            optimizer.step()
    print(f"rank {hvkit.rank()} of {hvkit.size()} has read {len(rows)} rows", flush=True)
    with hvkit.settled(model):
        return model


def test_ranks_train_on_parquet_asynchronously(spark, table, capfd):
    arguments = {"epochs": 20, "strategy": hvkit.ParameterServer(staleness=2)}
    for model in hvkit.spark.run(train, (table,), arguments, num_proc=2):
        assert model.weight.detach().numpy()[0] == pytest.approx([2, -1], abs=0.05)
    printed = capfd.readouterr().out
    assert "rank 0 of 2 has read 32 rows" in printed
    assert "rank 1 of 2 has read 32 rows" in printed


def test_the_page_for_those_who_come_from_spark_trains(spark, tmp_path, monkeypatch):
    (code,) = scripts("docs/from-spark.md")
    (tmp_path / "page.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path("page.py", run_name="__main__")
    first, second = (model.weight.tolist() for model in names["models"])
    assert first == second
    assert first[0] == pytest.approx([2, -1], abs=0.05)


def test_keras_trains_on_parquet(spark, table):
    def fit():
        import keras
        import numpy as np
        import pyarrow.dataset

        rows = hvkit.shard(pyarrow.dataset.dataset(table)).to_numpy()
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)
        model, optimizer = hvkit.distribute(model, optimizer)
        model.compile(optimizer, "mse")
        x, y = np.float32(rows["x"]), np.float32(rows["y"])
        model.fit(x, y, batch_size=8, epochs=20, verbose=0)
        return model.get_weights()[0].tolist(), keras.backend.backend()

    (first, backend), (second, _) = hvkit.spark.run(fit, num_proc=2)
    assert backend == "tensorflow"
    assert first == second
    assert [row[0] for row in first] == pytest.approx([2, -1], abs=0.05)


def test_jax_trains_on_parquet_without_horovod(spark, table):
    def train_jax():
        import sys

        import jax
        import jax.numpy as jnp
        import numpy as np
        import optax
        import pyarrow.dataset

        hvkit.init("jax")
        rows = hvkit.shard(pyarrow.dataset.dataset(table))
        params, tx = hvkit.distribute({"w": jnp.zeros(2)}, optax.sgd(0.1))
        state = tx.init(params)

        def loss(params, x, y):
            return jnp.square(x @ params["w"] - y).mean()

        for _ in range(20):
            for batch in rows.batches(8):
                x, y = hvkit.batch(np.float32(batch["x"]), np.float32(batch["y"]))
                changes, state = tx.update(jax.grad(loss)(params, x, y), state)
                params = optax.apply_updates(params, changes)
        return params["w"].tolist(), "horovod" in sys.modules

    (first, with_horovod), (second, _) = hvkit.spark.run(train_jax, num_proc=2)
    assert not with_horovod
    assert first == second == pytest.approx([2, -1], abs=0.05)


class Diverged(Exception):
    pass


def test_ranks_have_the_modules_and_files_that_spark_ships(spark, tmp_path, monkeypatch):
    (tmp_path / "shipped.py").write_text("value = 5")
    (tmp_path / "words.txt").write_text("six")
    spark.sparkContext.addPyFile(str(tmp_path / "shipped.py"))
    spark.sparkContext.addFile(str(tmp_path / "words.txt"))
    # The driver's own copies, which on a cluster are on another host.
    here = SparkFiles.getRootDirectory()
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != here])

    def read():
        import shipped

        with open(SparkFiles.get("words.txt")) as file:
            return shipped.value, file.read(), SparkFiles.getRootDirectory()

    ((value, words, there),) = hvkit.spark.run(read, num_proc=1)
    assert (value, words) == (5, "six")
    assert there != here


def test_an_exception_has_its_own_type_and_ranks_their_variables(spark):
    def fail():
        if hvkit.rank() == 1:
            raise Diverged(os.environ["OF_THE_JOB"])
        hvkit.barrier()

    with pytest.raises(Diverged, match="set") as raised:
        hvkit.spark.run(fail, num_proc=2, env={"OF_THE_JOB": "set"})
    assert "raised on rank 1" in raised.value.__notes__[0]


def test_a_killed_rank_is_named(spark):
    def killed():
        if hvkit.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hvkit.barrier()

    with pytest.raises(hvkit.RankLostError, match=r"rank 1 on \S+ was killed by signal 9"):
        hvkit.spark.run(killed, num_proc=2)


def test_why_a_task_has_refused_to_start_its_rank_is_in_the_error(spark, monkeypatch):
    def refuses(*_):
        def task(_):
            raise LaunchError("no network interface of node1 has the address 127.0.1.1")

        return task

    monkeypatch.setattr(job, "RankTask", refuses)
    with pytest.raises(
        LaunchError, match="the Spark job has failed: no network interface of node1"
    ):
        hvkit.spark.run(print, num_proc=1)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("An error occurred.\n: a.b.C: full\n\tat x", "An error occurred."),
        (f"Py4J:\n: {SPARKS}Job 0 cancelled\n\tat x\n", "Job 0 cancelled"),
        (f"Py4J:\n: {SPARKS}Job aborted: {SPARKS}no room\n\tat x", "no room"),
        (f"Py4J:\n: {SPARKS}aborted:\nhvkit.errors.LaunchError: no network", "no network"),
    ],
)
def test_of_sparks_text_the_innermost_reason_is_shown(text, reason):
    failed = SimpleNamespace(problem=text)
    assert job._Job.reason(failed, "") == reason
    assert job._Job.reason(failed, "rank 1 failed") == f"{reason} (rank 1 failed)"


def of_ranks():
    """The processes of agents, ranks and supervisors."""
    for process in psutil.process_iter(["cmdline"]):
        if any(word.startswith("hvkit.") for word in process.info["cmdline"] or []):
            yield process


def test_a_cancelled_job_leaves_nothing(spark, tmp_path):
    def wait(folder):
        (folder / str(hvkit.rank())).touch()
        time.sleep(600)

    def cancel():
        wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
        spark.sparkContext.cancelAllJobs()

    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.raises(LaunchError, match=r"the Spark job has failed: .*cancel"):
        hvkit.spark.run(wait, (tmp_path,), num_proc=2)
    thread.join()
    wait_until(lambda: not list(of_ranks()))


def test_more_ranks_than_places_are_refused_also_from_a_thread_without_a_session(
    spark, monkeypatch
):
    job._await_executors(spark.sparkContext, 2)
    monkeypatch.setattr(job, "_EXECUTORS_COME", 0.0)
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(LaunchError, match="num_proc=3 is more than the 2 tasks"),
    ):
        pool.submit(hvkit.spark.run, print, num_proc=3).result()


def test_a_lost_executor_is_named(spark, tmp_path):
    """The last test with ranks: Spark takes a while to start another executor."""

    def wait(folder):
        (folder / str(hvkit.rank())).write_text(str(os.getpid()))
        time.sleep(600)

    def kill():
        wait_until(lambda: len([each for each in tmp_path.iterdir() if each.read_text()]) == 2)
        rank = psutil.Process(int((tmp_path / "1").read_text()))
        next(each for each in rank.parents() if "java" in each.name()).kill()

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(hvkit.RankLostError, match=r"Spark has lost the executor at [\w.]+:\d+"):
        hvkit.spark.run(wait, (tmp_path,), num_proc=2)
    thread.join()
    wait_until(lambda: not list(of_ranks()))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"args": "abc"}, r"args must be a tuple .*args=\('abc',\)"),
        ({"kwargs": [1]}, r"kwargs must be a dict .*got \[1\]: kwargs="),
        ({"env": {"A": 1}}, "must be str, got 'A': 1: write 'A': '1'"),
    ],
)
def test_arguments_of_other_kinds_are_refused_with_the_fix(options, text):
    with pytest.raises(TypeError, match=text):
        hvkit.spark.run(print, **options)


def test_ranks_of_a_host_follow_each_other():
    assert positions(["a", "b", "a"]) == [
        RankPosition(rank=0, local_rank=0, local_size=2, cross_rank=0, cross_size=2),
        RankPosition(rank=2, local_rank=0, local_size=1, cross_rank=1, cross_size=2),
        RankPosition(rank=1, local_rank=1, local_size=2, cross_rank=0, cross_size=1),
    ]


def test_an_executor_whose_name_resolves_to_no_address_of_its_host_is_named():
    assert _interface("a", "a.ns", LOOPBACK)
    with pytest.raises(
        LaunchError, match=r"of a has the address 127\.0\.1\.1, .*, a\.ns, resolves"
    ):
        _interface("a", "a.ns", "127.0.1.1")


def test_the_rendezvous_answers_only_those_who_know_the_key():
    import urllib.error
    import urllib.request

    store = Store(LOOPBACK, b"key")
    with pytest.raises(OSError, match="key"):
        Front((LOOPBACK, store.port), b"another key")
    first, second = (Front((LOOPBACK, store.port), b"key") for _ in range(2))

    def request(front, method, data=None):
        url = f"http://{LOOPBACK}:{front.port}/global/0"
        return urllib.request.urlopen(urllib.request.Request(url, data, method=method)).read()

    with pytest.raises(urllib.error.HTTPError, match="404"):
        request(first, "GET")
    request(first, "PUT", b"\0address")
    assert request(second, "GET") == b"\0address"
    request(second, "DELETE")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        request(first, "GET")
    for each in (first, second, store):
        each.close()


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met within 60 seconds"
        time.sleep(0.05)
