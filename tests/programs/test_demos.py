"""Every demo runs, checks its results and leaves nothing behind; the sources of the digits."""

import argparse
import gzip
import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import numpy as np
import psutil
import pytest
from backend import theano_only
from deadline import wait_for
from process_state import ProcessState
from scripts import ROOT

import synkhronos as synk

sys.path.append(str(ROOT))

from demos.lasagne_mnist import cli, data, training

DEMOS = sorted(p.relative_to(ROOT) for p in ROOT.glob("demos/**/*.py") if "__main__" in p.read_text())
SMALL = ["--data", "digits", "--epochs", "2", "--update-rule", "sgd"]
ARGUMENTS = {
    "train_mnist_theano": [*SMALL, "--model", "custom_mlp:1,32,0.1,0.2"],
    "train_mnist_cpu_data": [*SMALL, "--model", "custom_mlp:1,32,0.1,0.2", "--ranks", "2"],
    "train_mnist_gpu_data": [*SMALL, "--model", "custom_mlp:1,32,0.1,0.2", "--ranks", "3"],
    "train_resnet_theano": [],
    "train_resnet": ["--ranks", "2", "--depth", "5", "--epochs", "1"],
    "digits": ["--ranks", "3", "--epochs", "10", "--accuracy", "0.9"],
    "training_rules": ["--ranks", "2", "--epochs", "12", "--accuracy", "0.85"],
    "k_means": ["--ranks", "3", "--rows", "2001"],
    "hierarchical": ["--ranks", "2", "--rows", "300", "--draws", "20"],
    "run_lasagne_demos": [*SMALL, "--model", "custom_mlp:1,32,0,0", "--ranks", "2", "--json", "all.json"],
}
LAST_LINES = {  # other demos print that all results agree
    "train": "accuracy: ",
    "digits": "test accuracy 0.9",
    "training": "all scores are at least 0.85",
    "run": "plot: lasagne_mnist.png",
    "hierarchical": "density, gradient and coefficients agree",
}


def marked(demo):
    """Return a demo as a parameter of a test, with a mark if it needs Lasagne or PyMC."""
    lasagne = pytest.param(demo, marks=theano_only("Lasagne"))
    if demo.parent.name == "pymc":
        return pytest.param(demo, marks=pytest.mark.skipif(find_spec("pymc") is None, reason="PyMC is not installed"))
    return demo if demo.parent.name == "demos" and demo.stem != "demo_6" else lasagne


def run_demo(command, folder, timeout=280):
    """Run a demo in an empty folder, check that it left nothing behind, and return its output."""
    mark = f"{os.getpid()}-{os.urandom(8).hex()}"
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "SYNKHRONOS_TEST": mark, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    before = ProcessState().shared
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen([sys.executable, *command], cwd=folder, env=environment, **streams)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        for left in marked_processes(mark):
            left.kill()
        pytest.fail(f"{command} did not end in {timeout} s: {process.communicate()[0]}")
    assert process.returncode == 0, output
    wait_for(lambda: not marked_processes(mark), lambda: f"the end of {marked_processes(mark)}")
    wait_for(lambda: not ProcessState().shared - before, "the removal of its names in /dev/shm")
    assert "\r" not in output, "a progress bar without a terminal"
    return output


def marked_processes(mark):
    """List the running processes whose environment has the mark."""
    there = [one for one in psutil.process_iter(["environ", "status"]) if one.info["status"] != psutil.STATUS_ZOMBIE]
    return [one for one in there if (one.info["environ"] or {}).get("SYNKHRONOS_TEST") == mark]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("demo", [marked(demo) for demo in DEMOS], ids=lambda path: path.stem)
def test_demo_as_a_script(demo, tmp_path):
    output = run_demo([str(ROOT / demo), *ARGUMENTS.get(demo.stem, ["--ranks", "2"])], tmp_path)
    assert LAST_LINES.get(demo.stem.split("_")[0], "all results agree with") in output.splitlines()[-1]
    if demo.stem == "run_lasagne_demos":
        compare_reports(json.loads((tmp_path / "all.json").read_text()))
        assert (tmp_path / "lasagne_mnist.png").stat().st_size > 10000


def test_one_epoch_on_digits_needs_no_accuracy(tmp_path):
    run_demo([str(ROOT / "demos" / "digits.py"), "--ranks", "2", "--epochs", "1"], tmp_path)


def compare_reports(reports):
    """Check that two ranks with the same minibatches trained as plain Theano did."""
    assert [report["ranks"] for report in reports] == [1, 2, 2]
    theano_losses, losses, _ = ([epoch["train_loss"] for epoch in r["epochs"]] for r in reports)
    np.testing.assert_allclose(losses, theano_losses, rtol=1e-4)
    assert reports[0]["test_accuracy"] == pytest.approx(reports[1]["test_accuracy"], abs=0.01)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name", ["demo_3", pytest.param("lasagne_mnist.train_mnist_cpu_data", marks=theano_only("Lasagne"))]
)
def test_demo_as_a_module(name, tmp_path):
    arguments = ARGUMENTS.get(name.split(".")[-1], ["--ranks", "3"])
    run_demo(["-m", f"demos.{name}", *arguments], tmp_path)


@theano_only("Lasagne")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rule", ["localsgd:every=4", "EASGD:every=4,beta=0.5", "bsp"])
def test_mnist_with_a_training_rule(rule, tmp_path):
    script = str(ROOT / "demos/lasagne_mnist/train_mnist_cpu_data.py")
    options = ["--model", "custom_mlp:1,32,0,0", "--epochs", "6", "--ranks", "2", "--json", "report.json"]
    output = run_demo([script, "--data", "digits", *options, "--rule", rule], tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    losses = [epoch["train_loss"] for epoch in report["epochs"]]
    assert len(losses) == 6 and losses[-1] < losses[0] / 2
    assert report["test_accuracy"] > 0.8
    n_steps = 6 * -(-report["images"] // 64)  # 64 images of all ranks
    assert sum(report["steps"]) == 2 * n_steps
    assert all(bool(n) == (rule != "bsp") for n in report["exchanges"])
    assert report["arguments"]["rule"].lower().startswith(rule.split(":")[0].lower())
    assert not [line for line in output.splitlines() if "Warning" in line]


@theano_only("Lasagne")
def test_a_training_rule_has_no_checkpoints(capsys):
    from demos.lasagne_mnist import train_mnist_cpu_data

    with pytest.raises(SystemExit):
        train_mnist_cpu_data.main(["--rule", "localsgd:every=4", "--resume"])
    assert "--rule has no checkpoints: leave out --checkpoint and --resume" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("localsgd:every=8", synk.rules.LocalSGD(every=8)),
        ("DASO", synk.rules.DASO()),
        ("hierarchical:periods={2: 'node', 4: 'all'}", synk.rules.Hierarchical({2: "node", 4: "all"})),
        ("gosgd:probability=0.5", synk.rules.GoSGD(probability=0.5)),
    ],
)
def test_training_rules_of_the_command_line(text, rule):
    assert cli.training_rule(text) == rule


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sgd", "there is no rule 'sgd': expected one of ASGD, BMUF"),
        ("localsgd:8", "not of the form NAME=VALUE,NAME=VALUE"),
        ("localsgd:every=0", "every is 0; expected an int of at least 1"),
        ("localsgd:often=8", "unexpected keyword argument 'often'"),
        ("localsgd:every=(", "'localsgd:every=('"),
        ("localsgd", "missing 1 required positional argument: 'every'"),
    ],
)
def test_mistyped_training_rules_are_refused(text, reason):
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(reason)):
        cli.training_rule(text)


@theano_only("Lasagne")
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_cnn_reaches_97_percent(tmp_path):
    command = ["--data", "digits", "--ranks", "2", "--json", "report.json"]
    run_demo([str(ROOT / "demos/lasagne_mnist/train_mnist_cpu_data.py"), *command], tmp_path, 360)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["arguments"]["model"] == "cnn" and len(report["epochs"]) <= 10
    assert report["test_accuracy"] >= 0.97


@pytest.mark.parametrize(("lengths", "size"), [([5, 5], 4), ([4, 3, 3], 7), ([2, 1, 1, 1, 1], 3), ([9], 4)], ids=str)
def test_minibatches_of_ranks_draw_each_row_once(lengths, size):
    batches = list(training.rank_minibatches(lengths, size, np.random.RandomState(0)))
    for rank, length in enumerate(lengths):
        drawn = np.concatenate([batch[rank] for batch in batches])
        assert sorted(drawn) == list(range(length))
    if size >= len(lengths):
        assert all(training.count(batch) <= size for batch in batches)


# The sources of the digits.


def idx(array):
    """Return an array of bytes in the IDX format."""
    return struct.pack(f">2xBB{array.ndim}I", 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def mnist(monkeypatch):
    """Replace MNIST's files and checksums by those of a small data set; return the bytes of each file."""
    rng = np.random.RandomState(0)
    files = {}
    for name in data.FILES:
        n = 60 if name.startswith("train") else 10
        shape, top = ((n, 28, 28), 256) if "images" in name else ((n,), 10)
        files[name] = gzip.compress(idx(rng.randint(0, top, shape).astype(np.uint8)))
    monkeypatch.setattr(data, "FILES", {name: hashlib.sha256(b).hexdigest() for name, b in files.items()})
    return files


@pytest.fixture
def mirror(tmp_path_factory):
    """Serve a folder over HTTP, and yield its path and address."""
    folder = tmp_path_factory.mktemp("mirror")
    handler = partial(type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": print}), directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def write(files, folder, uncompressed=False):
    for name, content in files.items():
        path = folder / (name[:-3] if uncompressed else name)
        path.write_bytes(gzip.decompress(content) if uncompressed else content)


@pytest.mark.parametrize("uncompressed", [False, True])
def test_mnist_from_a_folder(mnist, tmp_path, uncompressed):
    write(mnist, tmp_path, uncompressed)
    sets = data.load(str(tmp_path), mirrors=[])
    assert [len(array) for array in sets[:6]] == [50, 50, 10, 10, 10, 10]
    check_sets(sets)


def check_sets(sets):
    for x, y in zip(sets[0:6:2], sets[1:6:2]):
        assert x.shape == (len(y), 1, 28, 28) and x.dtype == "float32" and y.dtype == "int32"
        assert x.min() == 0 and 0.9 < x.max() <= 1 and set(y) <= set(range(10))


def test_download_takes_the_first_mirror_that_is_right(mnist, mirror, tmp_path):
    served, address = mirror
    write(mnist, served)
    (served / "broken").mkdir()
    write({name: content[:-1] for name, content in mnist.items()}, served / "broken")
    folder = tmp_path / "new" / "folder"
    sets = data.load(str(folder), [address + "nothing/", address + "broken/", address])
    check_sets(sets)
    assert sorted(path.name for path in folder.iterdir()) == sorted(mnist)
    data.load(str(folder), [])  # nothing is downloaded again


def test_wrong_checksum_leaves_no_file(mnist, mirror, tmp_path):
    served, address = mirror
    write(dict.fromkeys(mnist, b"something else"), served)
    with pytest.raises(OSError, match=r"no mirror gave train-images-idx3-ubyte\.gz \(.*checksum"):
        data.download(tmp_path, [address])
    assert not list(tmp_path.iterdir())


def test_digits_without_a_network(tmp_path, capsys):
    sets = data.load(str(tmp_path), ["http://127.0.0.1:9/"])
    assert "Using scikit-learn's 1,797 handwritten digits" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    check_sets(sets)
    again = data.load("digits")
    assert all(np.array_equal(a, b) for a, b in zip(sets[:6], again[:6]))
    images = np.concatenate(sets[0:6:2]).reshape(-1, 784)
    assert len(images) == 1797 and len(np.unique(images, axis=0)) == 1797  # no image is in two sets


@pytest.mark.parametrize(
    ("option", "value", "reason"),
    [
        ("--model", "foo", "there is no model 'foo': expected cnn, mlp or custom_mlp:DEPTH,WIDTH,DROP_IN,DROP_HID"),
        ("--model", "custom_mlp:2,800", "there is no model 'custom_mlp:2,800': expected cnn, mlp or custom_mlp"),
        ("--model", "custom_mlp:0,800,0,0", "0 is less than 1"),
        ("--model", "custom_mlp:2,800,0,1", "1 is no probability from 0 to below 1"),
        ("--dropout", "1.5", "1.5 is no probability from 0 to below 1"),
        ("--data", "digist", "there is no folder 'digist': expected one that exists, or 'digits'"),
    ],
)
def test_mistyped_options_are_refused_first(tmp_path, monkeypatch, capsys, option, value, reason):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        cli.parse_arguments(cli.make_parser("A demo"), [option, value])
    assert caught.value.code == 2
    assert f"error: argument {option}: {reason}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_correct_options_are_accepted(tmp_path):
    for model in ("cnn", "mlp", "custom_mlp:1,32,0.1,0.2"):
        for place in ("digits", str(tmp_path)):
            args = cli.parse_arguments(cli.make_parser("A demo"), ["--model", model, "--data", place])
            assert (args.model, args.data) == (model, place)


def test_broken_files_are_reported(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"\x00\x00\x0d\x01" + bytes(8))
    with pytest.raises(ValueError, match="is not an IDX file of unsigned bytes"):
        data.read_idx(path)
    path.write_bytes(idx(np.zeros((2, 3), np.uint8))[:-1])
    with pytest.raises(ValueError, match=r"has 5 bytes of data, its header says \(2, 3\)"):
        data.read_idx(path)
