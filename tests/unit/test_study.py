"""The study in docs/ has the networks that it names, and its page has the table that the script prints."""

import importlib.util

import pytest
from scripts import ROOT


@pytest.fixture(scope="module")
def study():
    spec = importlib.util.spec_from_file_location("draw_study", ROOT / "docs" / "draw_study.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("network", "n_weights", "flops"),
    [
        ("resnet50", 25.5e6, 2 * 4.09e9),  # of torchvision's resnet50: 25.56 million with those of batch normalization
        ("vgg16", 138.3e6, 2 * 15.47e9),  # of torchvision's vgg16
        ("transformer_block", 12 * 1024**2, 2 * 512 * 12 * 1024**2 + 4 * 512**2 * 1024),
    ],
)
def test_networks_have_the_known_sizes(study, network, n_weights, flops):
    layers = getattr(study, network)()
    assert sum(layer.n_weights for layer in layers) == pytest.approx(n_weights, rel=2e-3)
    assert sum(layer.flops for layer in layers) == pytest.approx(flops, rel=5e-3)


def test_the_table_is_that_of_the_page(study):
    assert study.table(study.studies()) in (ROOT / "docs" / "study.md").read_text(encoding="utf-8")


def test_a_layer_takes_the_time_of_its_products_passes_and_update(study):
    layer, chip = study.Layer(2e6, 100, 50, 10_000, passes=4), study.Roofline(1e9, 1e9)
    products, passes, update = 3 * 8 * 2e6 / 1e9, 4 * 4 * 8 * 50 / 1e9, 5 * 4 * 10_000 / 1e9
    assert study.seconds_of(layer, 8, chip) == pytest.approx(products + passes + update)
    assert study.seconds_of(layer, 0, chip) == pytest.approx(3 * 40_000 / 1e9 + update)


def test_the_first_gradients_exist_after_the_forward_pass_and_the_last_layers(study):
    first, last, chip = study.Layer(2e6, 100, 50, 10_000, passes=11), study.Layer(1e6, 50, 9, 300_000), study.GPU
    (forward, backward, _), (of_last, back_of_last, _) = (study.parts_of(one, 64, chip) for one in (first, last))
    product = 2e6 * 64 / 15.7e12  # arithmetic takes longer than memory
    assert forward == pytest.approx(product + 5 * 4 * 64 * 50 / 900e9)
    assert backward == pytest.approx(2 * product + 6 * 4 * 64 * 50 / 900e9)
    step = sum(map(sum, (study.parts_of(one, 64, chip) for one in (first, last))))
    before = forward + of_last + back_of_last
    assert study.workload_of([first, last], chip).operands[0].until == pytest.approx((before / step,))
