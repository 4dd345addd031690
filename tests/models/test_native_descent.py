"""All steps of a training in one compiled call, against the loop of one step at a time: the same bits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hushfleet.data.samples import FeatureSamples, Samples
from hushfleet.data.targets import Targets
from hushfleet.learning.draws import Inputs
from hushfleet.learning.own_samples import LoadedSamples
from hushfleet.methods import make_method
from hushfleet.methods.cost import RoundTerms
from hushfleet.methods.local import PartOrder, PersonalFirst, Pull, Sgd, SharedOnly
from hushfleet.methods.local_round import LocalRound, OneClient, Trained
from hushfleet.methods.state import DeviceState, PublicState
from hushfleet.methods.task_method import TaskMethod, bind
from hushfleet.models import get_model
from hushfleet.models.layers import Conv, Layered, Linear, Pool
from hushfleet.models.model import Model
from hushfleet.models.native import make_native_optimizer
from hushfleet.models.native.gradient import NativeGradient
from hushfleet.wire.format.spec import DropoutSpec, PrivacySpec
from support.methods import no_logits

PRIVACY = PrivacySpec(unit="device", accounting="strict", clip_norm=1.0, noise_multiplier=0.0, delta=0.1)
RECORD = replace(PRIVACY, unit="record", noise_multiplier=1.0, batches=2)
NETWORK = Layered((3, 6, 7), (Conv(16, 2), Pool(), Linear(16), Linear(4, relu=False)))
MODEL = Model("small", "this test", (3, 6, 7), 4, NETWORK.layout, (), NETWORK)


@pytest.fixture(autouse=True)
def compiler(need_compiler):
    need_compiler()


@cache
def compiled() -> NativeGradient:
    return NativeGradient(MODEL)


class Stepwise:
    """A compiled gradient that does one step at a time."""

    takes_part = True

    def __init__(self, gradient: NativeGradient) -> None:
        self.gradient = gradient

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.gradient(*arguments, **named)


class InOneCall(Stepwise):
    """Notices when all steps are done at once."""

    calls = 0

    def descend(self, *arguments: Any) -> np.ndarray:
        self.calls += 1
        return self.gradient.descend(*arguments)


def samples_of(count: int, model: Model = MODEL, *, as_floats: bool = False, seed: int = 0) -> Samples:
    rng, channels = np.random.default_rng(seed), model.input_shape[0]
    images = rng.integers(0, 256, (count, *model.input_shape)).astype(np.uint8)
    mean, std = (0.3, 0.1, 0.7)[:channels], (0.5, 0.25, 0.3)[:channels]
    labels = rng.integers(0, model.classes, count)
    return Samples(images.astype(np.float32) / 7 if as_floats else images, labels, mean, std)


def begun(method: TaskMethod, gradient: Any, samples: Any, model: Model, personal: float) -> tuple[LocalRound, Any]:
    """A local round, and the generator that draws its batches."""
    rng = np.random.default_rng(5)
    mask = rng.random(model.layout.size) < personal
    own = model.init(4) if mask.any() or method.parts.own_training else None
    state = DeviceState(PublicState(mask, 1), own)
    loaded = LoadedSamples(samples, gradient, no_logits, by_record=method.by_record)
    return LocalRound(method, state, model.init(3) + np.float32(0.1), RoundTerms(), loaded), rng


def train(method: TaskMethod, gradient: Any, samples: Any, model: Model = MODEL, **changes: Any) -> Trained:
    local, rng = begun(method, gradient, samples, model, changes.pop("personal", 0.0))
    how = {"inputs": Inputs(), "rng": rng, "make_optimizer": make_native_optimizer, **changes}
    return local.train(**how)


def assert_same(gradient: NativeGradient, method: TaskMethod, samples: Any, *more: Any, **changes: Any) -> None:
    by_step = train(method, Stepwise(gradient), samples, *more, **changes)
    at_once = InOneCall(gradient)
    done = train(method, at_once, samples, *more, **changes)
    assert at_once.calls == (2 if method.parts.own_training else 1) * (len(samples) > 0)
    assert done.loss == by_step.loss
    for ours, theirs in ((done.end, by_step.end), (done.own, by_step.own)):
        assert ours.tobytes() == theirs.tobytes()


OPTIMIZERS = st.sampled_from([("sgd", 0.0), ("sgd", 0.9), ("adam", 0.0)])
ORDERS = st.sampled_from([PartOrder(), SharedOnly(), PersonalFirst(), PersonalFirst(1)])


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 13),
    others=st.lists(st.integers(0, 13), max_size=3),
    batch_size=st.integers(1, 6),
    local_epochs=st.integers(1, 3),
    local_steps=st.integers(0, 7),
    optimizer=OPTIMIZERS,
    order=ORDERS,
    pulls=st.lists(st.sampled_from([0.0, 0.1, 3.0]), max_size=2),
    personal=st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    as_floats=st.booleans(),
)
def test_any_training(
    count, others, batch_size, local_epochs, local_steps, optimizer, order, pulls, personal, as_floats
):
    name, momentum = optimizer
    config = {"learning_rate": 0.1 if name == "sgd" else 0.01, "batch_size": batch_size, "local_epochs": local_epochs}
    config |= {"optimizer": name, "momentum": momentum, "local_steps": local_steps}
    method = make_method("fedavg", config, PRIVACY, MODEL.layout, rounds=1)
    training = Sgd(penalties=tuple(map(Pull, pulls)), order=order)
    method = bind(replace(method.parts, training=training), method.config, PRIVACY, MODEL.layout)
    each = [samples_of(n, as_floats=as_floats, seed=seed) for seed, n in enumerate((count, *others))]
    assert_same(compiled(), method, each[0], personal=personal)
    assert_together(compiled(), method, each, personal)


def assert_together(gradient: NativeGradient, method: TaskMethod, each: list[Any], personal: float) -> None:
    """Several clients in one call end as each alone."""
    locals = [begun(method, gradient, samples, MODEL, personal) for samples in each]
    clients = [OneClient(local, method.training, Inputs(), rng) for local, rng in locals]
    ends, descents = np.stack([local.context.start for local, _ in locals]), [client.descent() for client in clients]
    if any(descent.batches for descent in descents):
        losses = gradient.descend(descents, ends)
        for samples, end, loss, descent in zip(each, ends, losses, descents, strict=True):
            alone = train(method, gradient, samples, personal=personal)
            assert end.tobytes() == alone.end.tobytes()
            assert loss / max(1, sum(map(len, descent.batches))) == alone.loss


@pytest.mark.parametrize("name", ["fedprox", "ditto", "fedper", "lg-fedavg", "fedrep"])
def test_the_methods_that_train_plainly(name):
    method = make_method(name, {"batch_size": 4, "local_epochs": 3}, PRIVACY, MODEL.layout, rounds=1)
    assert_same(compiled(), method, samples_of(11))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["digits-cnn", "mnist-cnn"])
def test_networks_of_the_product(name):
    model = get_model(name)
    method = make_method(
        "fedavg", {"batch_size": 4, "optimizer": "sgd", "momentum": 0.5}, PRIVACY, model.layout, rounds=1
    )
    assert_same(NativeGradient(model), method, samples_of(10, model), model)


@pytest.mark.parametrize("given", [None, 37])
def test_a_linear_head_on_features(given):
    """Whose features lie beside those that the device keeps for itself, if they are `given`."""
    rng, model = np.random.default_rng(0), get_model("linear", classes=4, input_shape=(given or 40, 1, 1))
    features = FeatureSamples(rng.standard_normal((9, 40, 1, 1), np.float32), rng.integers(0, 4, 9), given=given)
    privacy = replace(PRIVACY, noise_multiplier=1.0)
    method = make_method("hush", {"local_epochs": 3}, privacy, model.layout, rounds=3)
    assert_same(NativeGradient(model), method, features, model)


def test_a_linear_head_whose_samples_are_clipped():
    rng, model = np.random.default_rng(0), get_model("linear", classes=4, input_shape=(8, 1, 1))
    features = FeatureSamples(rng.standard_normal((9, 8, 1, 1), np.float32), rng.integers(0, 4, 9))
    privacy = replace(PRIVACY, accounting="as-published")
    config = {"optimizer": "sgd", "learning_rate": 0.5, "clipping": "value", "max_norm": 0.5}
    method = make_method("perfreezeclip", config, privacy, model.layout, rounds=1)
    run = NativeGradient(model)
    done, one_by_one = (train(method, each, features, model) for each in (run, Stepwise(run)))
    np.testing.assert_allclose(done.end, one_by_one.end, rtol=1e-4, atol=1e-6)
    assert not np.allclose(done.end, model.init(3) + np.float32(0.1), atol=1e-3)


def test_what_needs_more_than_plain_steps_goes_step_by_step():
    layout, samples = MODEL.layout, samples_of(6)
    fedavg = make_method("fedavg", {}, PRIVACY, layout, rounds=1)

    def in_one_call(method: TaskMethod = fedavg, *, samples: Any = samples, gradient: Any = None, **how: Any) -> bool:
        loaded = LoadedSamples(samples, gradient or InOneCall(compiled()), no_logits)
        local = LocalRound(method, method.init_state(), MODEL.init(0), RoundTerms(), loaded)
        how = {"inputs": Inputs(), "rng": np.random.default_rng(0), **how}
        return OneClient(local, method.training, **how).in_one_call

    assert in_one_call()
    assert not in_one_call(gradient=Stepwise(compiled()))
    assert not in_one_call(inputs=Inputs(dropout=(DropoutSpec((4,), 0.5),)))
    assert not in_one_call(inputs=Inputs(augment="flip-crop"))
    assert not in_one_call(samples=replace(samples, labels=np.zeros((6, 1), np.float32), targets=Targets("binary")))
    by_record = make_method("fedavg", {}, RECORD, layout, rounds=1)
    assert not in_one_call(record=by_record.record_mechanism(RoundTerms()))
    for name in ("dp-fedsam", "blur-lus", "fedglp-adp", "pfedsd", "perfreezeclip"):
        assert not in_one_call(make_method(name, {}, PRIVACY, layout, rounds=1)), name
    for more in ({"weight_decay": 0.1}, {"accumulate": 2}):
        assert not in_one_call(make_method("fedavg", more, PRIVACY, layout, rounds=1)), more
    resets = make_method("dp-fedsim", {"masks": "epoch"}, PRIVACY, layout, rounds=1)
    assert not in_one_call(resets)


def test_a_label_without_a_class_is_refused():
    samples = samples_of(7)
    samples.labels[3] = 4
    method = make_method("fedavg", {"batch_size": 2}, PRIVACY, MODEL.layout, rounds=1)
    with pytest.raises(ValueError, match=r"y\[3\] = 4: labels must be in 0 .. 3"):
        train(method, compiled(), samples)


def test_samples_of_another_shape_are_refused():
    method = make_method("fedavg", {}, PRIVACY, MODEL.layout, rounds=1)
    with pytest.raises(ValueError, match="samples must be"):
        train(method, compiled(), FeatureSamples(np.zeros((2, 5, 1, 1), np.float32), np.zeros(2, np.int64)))
