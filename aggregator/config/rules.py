"""The rules between the settings of a task file: the code of a rule, when it is broken, and a sentence for people."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hushfleet.data.form import NORMAL, OWN_DATA, SOUND, TABLES, form_rules, one_form
from hushfleet.errors import HushfleetError
from hushfleet.losses import LOSSES, find_loss
from hushfleet.methods.server import ServerHalf
from hushfleet.methods.stages import NumberReport
from hushfleet.methods.sums import check_sums
from hushfleet.privacy.noise_for import check_delta
from hushfleet.rules import Rule, Rules
from hushfleet.secure.committee import committee_rule
from hushfleet.wire.format.codecs import codec_of
from hushfleet.wire.format.messages import MAX_COHORT
from hushfleet.wire.format.spec import LOG_MEL, MAX_ROUNDS, UNIT_NORM

_OF_NUMBERS = ", ".join(repr(name) for name, loss in LOSSES.items() if loss.of_numbers)


def _error(check: Callable[[], object]) -> dict[str, object]:
    """Returns the error of a check for a sentence; empty if there is no error."""
    try:
        check()
    except HushfleetError as error:
        return {"error": error}
    return {}


def _have_fixed_layers(model: Any) -> bool:
    features = model.features
    return model.share == "head" or (features is not None and features.startswith(("torchvision:", "timm:")))


MODEL: Rules = {
    "model.features-need-linear": (
        lambda model: model.features not in (None, LOG_MEL) and model.name != "linear",
        "features go with name = 'linear', not {name!r}, which takes images",
    ),
    "model.log-mel-needs-network": (
        lambda model: model.features == LOG_MEL and (model.name == "linear" or model.share == "head"),
        "features = 'sound:log-mel' are an image of sound, which a whole network takes: set name = 'cnn' and share = "
        "'all'; a linear layer takes features = 'sound:speech'",
    ),
    "model.directions-need-features": (
        lambda model: model.directions is not None and model.features in (None, UNIT_NORM) and not model.public,
        "directions = {directions!r}: need features, or public samples; no other inputs have an order",
    ),
    "model.classes-need-public": (
        lambda model: model.public_classes and model.public is None,
        "public_classes = true: needs public samples, whose classes they are; set model.public",
    ),
    "model.head-needs-layers": (
        lambda model: model.share == "head" and model.name == "linear",
        "share = 'head' needs a network of several layers; 'linear' has one",
    ),
    "model.weights-need-fixed-layers": (
        lambda model: model.weights is not None and not _have_fixed_layers(model),
        "weights = {weights!r}: are those of the fixed layers, and need share = 'head' or features such as "
        "'torchvision:mobilenet_v3_small'",
    ),
    "model.targets-need-own-loss": (
        lambda model: model.targets is not None and not model.own_loss,
        "targets = {targets!r} belong to a loss of your own; leave it out with loss = {loss!r}",
    ),
    "model.tolerance-needs-numbers": (
        lambda model: (model.tolerance is not None) != find_loss(model.standard_loss).of_numbers,
        f"tolerance and a loss of numbers ({_OF_NUMBERS}) need each other, and loss = {{loss!r}} has tolerance = "
        "{tolerance}; it is how far a prediction may be from its target and still count as right, for example 0.5",
    ),
    "model.false-alarms-need-reconstruction": (
        lambda model: model.false_alarms is not None and not find_loss(model.standard_loss).of_inputs,
        "false_alarms = {false_alarms:g} belongs to loss = 'reconstruction'; leave it out",
    ),
    "model.reconstruction-needs-layers": (
        lambda model: find_loss(model.standard_loss).of_inputs and (model.name == "linear" or model.share == "head"),
        "loss = 'reconstruction' needs a network with a narrow layer, which one layer (name = 'linear', share = "
        "'head') does not have; take name = 'autoencoder', or your own with one output for each value of a sample",
    ),
    "model.autoencoder-needs-reconstruction": (
        lambda model: model.name in ("autoencoder", "second-moments") and not find_loss(model.standard_loss).of_inputs,
        "name = {name!r} gives its input back; set loss = 'reconstruction', not {loss!r}",
    ),
}

PRIVACY: Rules = {
    "privacy.noise-twice": (
        lambda privacy: privacy.noise_multiplier is not None and privacy.epsilon is not None,
        "noise_multiplier = {noise_multiplier:g} and epsilon = {epsilon:g}: give one of them, not both",
    ),
    "privacy.sample-rate-needs-record": (
        lambda privacy: privacy.sample_rate is not None and privacy.unit != "record",
        "sample_rate = {sample_rate:g}: needs unit = 'record'",
    ),
    "privacy.reading-needs-device": (
        lambda privacy: privacy.reading != "user-level" and privacy.unit == "record",
        "reading = {reading!r}: needs unit = 'device'; a record's epsilon has one accountant",
    ),
    "privacy.reading-needs-as-published": (
        lambda privacy: privacy.reading != "user-level" and privacy.accounting == "strict",
        "reading = {reading!r}: counts as a paper does, and not what the server sees; to repeat a paper write "
        'privacy.accounting = "as-published", else leave reading out',
    ),
    "privacy.noise-needs-clip-norm": (
        lambda privacy: math.isinf(privacy.clip_norm) and (privacy.noise_multiplier or privacy.epsilon),
        "clip_norm = inf: must be finite where noise is added, since the noise is scaled to it",
    ),
    "privacy.clip-norm-range": (  # what an update's steps can be
        lambda privacy: math.isfinite(privacy.clip_norm) and not 1e-9 <= privacy.clip_norm <= 1e4,
        "clip_norm = {clip_norm:g}: must be 1e-9 to 1e4, or inf",
    ),
    "privacy.noise-multiplier-range": (
        lambda privacy: privacy.noise_multiplier and privacy.noise_multiplier < 1e-6,
        "noise_multiplier = {noise_multiplier:g}: must be 0, or 1e-6 to 1000",
    ),
}

PLAN: Rules = {
    "plan.simulation-incomplete": (
        lambda plan: plan.measured_on and not (plan.images and plan.devices and len(plan.alone) == 2 and plan.points),
        "measured_on = {measured_on!r}: a simulation needs images, devices, two values of alone, and points; "
        "`hushfleet plan --data --out` writes them",
    ),
}

DATA: Rules = {
    "data.window-too-short": (
        lambda data: data.window_s and data.window_s < 3600,
        "window = {window!r}: must be an hour or more, such as '30d'",
    ),
    "data.dirichlet-needs-alpha": (
        lambda data: data.partition.startswith("dirichlet") and data.alpha is None,
        "partition = {partition!r} needs alpha, for example alpha = 1.0",
    ),
    "data.pathological-needs-classes": (
        lambda data: data.partition == "pathological" and data.classes_per_device is None,
        "partition = 'pathological' needs classes_per_device, for example 2",
    ),
    "data.class-names-differ": (
        lambda data: len(set(map(one_form, data.class_names))) != len(data.class_names),
        "class_names = {class_names!l}: each name may appear only once",
    ),
    "data.folder-needs-form": (
        lambda data: data.name == "folder" and (not data.class_names or data.input_shape is None),
        "name = 'folder' needs class_names and input_shape, such as [3, 32, 32]",
    ),
    "data.sound-has-its-shape": (
        lambda data: data.name in SOUND and data.input_shape is not None,
        "input_shape must be left out with name = {name!r}: it follows from sample_rate and segment_s",
    ),
    "data.path-needs-own-data": (
        lambda data: data.name not in OWN_DATA and data.path is not None,
        f"path is for your own data alone ({', '.join(OWN_DATA)}); leave it out: name = {{name!r}} is in --data-dir",
    ),
    "data.mean-needs-std": (
        lambda data: len(data.mean) != len(data.std) or (data.mean and data.name not in OWN_DATA),
        "mean and std come together, one of each for a channel, with your own data; here they have {mean!n} and "
        "{std!n} values",
    ),
    "data.tokens-need-vocabulary": (
        lambda data: (data.values == "tokens") != (data.vocabulary > 0),
        "values = {values!r} and vocabulary = {vocabulary}: values = 'tokens' and vocabulary, the number of tokens, "
        "need each other",
    ),
    "data.tokens-without-mean": (
        lambda data: data.values == "tokens" and data.mean,
        "mean and std must be left out with values = 'tokens': a network looks tokens up, and does not scale them",
    ),
    "data.target-mean-needs-std": (
        lambda data: len(data.target_mean) != len(data.target_std),
        "target_mean and target_std come together, one of each for an output; here they have {target_mean!n} and "
        "{target_std!n} values",
    ),
    "data.target-mean-per-output": (
        lambda data: data.class_names and len(data.target_mean) not in (0, len(data.class_names)),
        "target_mean has {target_mean!n} values, and there are {class_names!n} outputs",
    ),
    "data.given-needs-owners": (
        lambda data: data.partition == "given" and data.name not in (*OWN_DATA, "speech-commands"),
        "partition = 'given' goes with your own data, which can say whose a sample is, and with 'speech-commands'",
    ),
    **form_rules("data", lambda data: data.name),
}


def _without(name: str, default: object) -> Rule:
    return (
        lambda round: not round.has_cohort and getattr(round, name) != default,
        f"{name} = {{{name}}}: mode = 'buffered' waits for nobody; leave it out",
    )


ROUND: Rules = {
    "round.trim-needs-trimmed-mean": (
        lambda round: (round.trim is not None) != (round.aggregation == "trimmed-mean"),
        "trim and aggregation = 'trimmed-mean' need each other, and aggregation = {aggregation!r} has trim = {trim}; "
        "it is the share of the updates that is left out at either end, for example 0.1",
    ),
    "round.buffered-needs-size": (
        lambda round: not round.has_cohort and round.buffer_size is None,
        'mode = "buffered" needs buffer_size, the updates that make a new model, for example 10',
    ),
    "round.buffered-without-cohort-size": _without("cohort_size", 0),
    "round.buffered-without-quorum": _without("quorum", 1.0),
    "round.buffered-without-min-updates": _without("min_updates", 1),
    "round.buffered-needs-mean": (
        lambda round: not round.has_cohort and round.aggregation != "mean",
        "aggregation = {aggregation!r}: a stale update counts less, which needs the 'mean'",
    ),
    "round.buffer-needs-buffered": (
        lambda round: round.has_cohort and (round.buffer_size, round.max_staleness) != (None, None),
        'buffer_size = {buffer_size}, max_staleness = {max_staleness}: need mode = "buffered"',
    ),
    "round.patience-below-rounds": (
        lambda round: round.patience >= round.rounds,
        "patience = {patience}: must be below rounds = {rounds}, or it ends nothing",
    ),
}

SCHEDULE: Rules = {
    "schedule.days-differ": (
        lambda schedule: len(set(schedule.days)) != len(schedule.days),
        "days = {days!l}: each day must stand there only once",
    ),
}

SEASON: Rules = {
    "season.number-needs-first": (
        lambda season: (season.number > 1) != (season.first is not None),
        "number = {number} and first = {first}: the fleet service writes both; leave both out",
    ),
}

EVALUATION: Rules = {
    "evaluation.held-out-zero": (
        lambda evaluation: not evaluation.held_out,
        "held_out = 0: there is no honest test without samples that never train; set 0.2",
    ),
}

STATISTIC: Rules = {
    "statistic.low-below-high": (
        lambda statistic: statistic.low >= statistic.high,
        "low = {low:g}, high = {high:g}: low must be below high",
    ),
    "statistic.range-finite": (
        lambda statistic: math.isinf(statistic.high - statistic.low),
        "low = {low:g}, high = {high:g}: their difference must be finite",
    ),
    "statistic.needs-column": (
        lambda statistic: not statistic.column and statistic.kind in ("mean", "histogram"),
        "kind = {kind!r} needs a column: the number of a value, from 0, or a target's name",
    ),
}


# Rules between sections. What follows from the settings is added to a task in between.

SEASON_OF_TASK: Rules = {
    "task.season-needs-no-until": (
        lambda task: task.season and task.schedule.until is not None,
        "schedule.until = {schedule.until} would end each season on that day: leave it out, as a season ends after "
        "season.every = {season.every!r}",
    ),
    "task.season-number-in-name": (
        lambda task: task.season and task.season.number > 1 and not task.name.endswith(f"-{task.season.number}"),
        "name = {name!r}: the name of season {season.number} must end in -{season.number}",
    ),
    "task.season-epsilon-twice": (
        lambda task: (
            task.season
            and task.season.epsilon not in (None, task.privacy.epsilon)
            and (task.privacy.epsilon, task.privacy.noise_multiplier) != (None, None)
        ),
        "season.epsilon = {season.epsilon:g}: [privacy] says already how much noise it has; leave one out",
    ),
}


def _no_meaning_in_buffer(task: Any) -> dict[str, str]:
    made = task.parts()
    refused = {
        "weighs updates by the model that they are added to": made.server.weighs,
        "gives devices more than the model of a version": bool(made.server.vectors),
        "steers a round by the reports of the one before": any(isinstance(s, NumberReport) for s in made.stages),
        "lets devices choose their own noise": made.max_preference is not None,
    }
    return next(({"words": words} for words, is_so in refused.items() if is_so), {})


def _cohort(task: Any) -> int:
    most: int = task.round.cohort_size or task.data.devices
    return most if task.round.cohort_size or not _is_named(task) else min(most, MAX_COHORT)


def _is_named(task: Any) -> bool:
    """Returns whether a round's plan names its devices: a cohort of secure aggregation follows from the roster."""
    return bool(task.privacy.accounting != "secure" and task.round.has_cohort)


_UPDATES_FIT = (
    lambda task: task.round.min_updates > _cohort(task) and {"cohort": _cohort(task)},
    "round.min_updates = {round.min_updates}: a round has {cohort} devices (data.devices, round.cohort_size), so none "
    "could ever close with so many updates; take {cohort} or fewer",
)

SUMS_OF_TASK: Rules = {
    "task.buffered-not-secure": (
        lambda task: not task.round.has_cohort and task.privacy.accounting == "secure",
        'round.mode = "buffered": masks cancel within one cohort that is settled before, so privacy.accounting = '
        '"secure" has no buffer. The sum over whoever comes in a window is round.mode = "synchronous" with deadline_s '
        "and min_updates",
    ),
    "task.buffered-not-as-published": (
        lambda task: not task.round.has_cohort and task.privacy.accounting == "as-published",
        'round.mode = "buffered": privacy.accounting = "as-published" divides the noise among a cohort, and each '
        'update of a buffer has its whole noise; take privacy.accounting = "strict"',
    ),
    "task.buffered-method": (
        lambda task: not task.round.has_cohort and _no_meaning_in_buffer(task),
        'round.mode = "buffered": method.name = {method.name!r} {words}, which has no meaning where a sum has updates '
        "of several versions; take for example 'dp-fedavg' or 'hush'",
    ),
    "task.masked-needs-secure": (
        lambda task: task.wire.codec == "masked" and task.privacy.accounting != "secure",
        'wire.codec = "masked" needs privacy.accounting = "secure"',
    ),
}

SECURE_AGGREGATION: Rules = {
    "task.secure-codec": (
        lambda task: task.wire.codec not in ("masked", type(task.wire)().codec),
        'wire.codec = {wire.codec!r}: secure aggregation has its own, "masked"; leave it out',
    ),
    "task.secure-needs-mean": (
        lambda task: task.round.aggregation != "mean",
        "round.aggregation = {round.aggregation!r}: secure aggregation gives only the mean",
    ),
    "task.secure-reading": (
        lambda task: task.privacy.reading != "user-level",
        "privacy.reading = {privacy.reading!r}: with privacy.accounting = 'secure' every round counts in full; leave "
        "it out",
    ),
    "task.secure-needs-clip-norm": (
        lambda task: math.isinf(task.privacy.clip_norm),
        "privacy.clip_norm = inf: must be finite for sums of whole numbers",
    ),
    "task.min-updates-above-cohort": _UPDATES_FIT,
}


def _corrupt_committee(task: Any) -> dict[str, int]:
    fraction = task.privacy.honest_fraction
    committee = committee_rule(_cohort(task), honest_fraction=fraction, membership_list=task.data.devices)
    return {} if committee.packed >= 1 else {"members": committee.members, "corrupt": committee.corrupt}


def _without_classes(broken: Callable[[Any], object], sentence: str) -> Rule:
    """Returns a rule for losses without classes."""
    return (
        lambda task: not find_loss(task.model.standard_loss).of_classes and broken(task),
        f"model.loss = {{model.loss!r}} has no classes, and {sentence}",
    )


def _check_delta(task: Any) -> None:
    check_delta(task.delta, max(task.data.devices, 2), as_published=task.privacy.accounting == "as-published")


def _no_noise(key: str) -> Rule:
    return (
        lambda task: task.privacy.unit != "record" and getattr(task.privacy, key) and not task.parts().stages,
        f"privacy.{key} = {{privacy.{key}:g}}: method.name = {{method.name!r}} adds no noise to updates, so no epsilon "
        f"holds; take for example 'dp-fedavg', or leave {key} out",
    )


def _question(task: Any) -> str:
    return "evaluation" if task.evaluation is not None else "statistic" if task.statistic is not None else ""


TASK: Rules = {
    "task.public-needs-features": (
        lambda task: task.model.public is not None and task.model.features is None,
        "model.public = {model.public!r}: needs model.features, whose directions public samples determine; with "
        "method.name = 'hush' and model.name = 'linear' they may be left out",
    ),
    "task.secure-method": (
        lambda task: (
            task.privacy.accounting == "secure"
            and _error(lambda: check_sums(task.parts(), task.some_privacy(), task.method.config()))
        ),
        "method.name = {method.name!r}: {error}",
    ),
    "task.cohort-too-large-for-plan": (
        lambda task: task.round.cohort_size > MAX_COHORT and _is_named(task),
        f"round.cohort_size = {{round.cohort_size}}: a round's plan names at most {MAX_COHORT} devices; take that or "
        "fewer, or 0 for as many as fit",
    ),
    "task.buffer-above-devices": (
        lambda task: (task.round.buffer_size or 0) > task.data.devices,
        "round.buffer_size = {round.buffer_size}: the fleet has {data.devices} devices (data.devices), and each sends "
        "one update a version; take {data.devices} or fewer",
    ),
    "task.cohort-above-devices": (
        lambda task: task.round.cohort_size > task.data.devices,
        "round.cohort_size = {round.cohort_size}: the fleet has {data.devices} devices (data.devices); take 0 for all "
        "of them",
    ),
    "task.min-updates-above-cohort": _UPDATES_FIT,
    "task.committee-corrupt": (
        lambda task: task.privacy.accounting == "secure" and _corrupt_committee(task),
        "privacy.honest_fraction = {privacy.honest_fraction:g}: of {members} members of a committee {corrupt} may be "
        "corrupt, so none could ever open a sum; more trust is needed",
    ),
    "task.min-devices-above-devices": (
        lambda task: (task.round.min_devices or 0) > task.data.devices,
        "round.min_devices = {round.min_devices}: the fleet has {data.devices} devices (data.devices), so no round "
        "could ever open; take {data.devices} or fewer",
    ),
    "task.min-devices-below-min-updates": (
        lambda task: (
            task.round.min_devices is not None
            and task.round.min_devices < task.round.min_updates
            and task.privacy.accounting != "secure"
        ),
        "round.min_devices = {round.min_devices}: a round that opens with so few devices could never close with "
        "round.min_updates = {round.min_updates}; take {round.min_updates} or more",
    ),
    "task.no-noise-for-epsilon": _no_noise("epsilon"),
    "task.no-noise-for-noise-multiplier": _no_noise("noise_multiplier"),
    "task.target-mean-needs-numbers": (
        lambda task: task.data.target_mean and not find_loss(task.model.standard_loss).of_numbers,
        f"data.target_mean and data.target_std need a model.loss of numbers ({_OF_NUMBERS})",
    ),
    "task.loss-data-with-classes": _without_classes(
        lambda task: (
            task.data.name not in ("arrays", *TABLES)
            and not (task.data.name == "sound" and find_loss(task.model.standard_loss).of_inputs)
        ),
        "data.name = {data.name!r} has classes; take 'arrays' or 'table', or for a reconstruction 'sound'",
    ),
    "task.normal-is-no-fault": _without_classes(
        lambda task: task.data.name == "sound" and NORMAL in task.data.class_names,
        f"data.class_names = {{data.class_names!l}} has {NORMAL!r}, the folder of sound without a fault: name kinds of "
        "faults alone, or leave it out",
    ),
    "task.loss-partition-by-classes": _without_classes(
        lambda task: task.data.partition not in ("iid", "given"),
        "data.partition = {data.partition!r} deals samples out by their classes; take 'iid', or 'given' with your own",
    ),
    "task.loss-unlabelled": _without_classes(
        lambda task: task.data.unlabelled > 0,
        "data.unlabelled = {data.unlabelled} is for personalized heads, which classes alone have; leave it out",
    ),
    "task.loss-augmented-input": _without_classes(
        lambda task: find_loss(task.model.standard_loss).of_inputs and task.data.augment != "none",
        "data.augment = {data.augment!r} changes the input and not the target; take 'none'",
    ),
    "task.loss-method-of-classes": _without_classes(
        lambda task: task.parts().of_classes,
        "method.name = {method.name!r} is defined for classes alone; take for example 'dp-fedavg' or 'fedper'",
    ),
    "task.warmup-below-rounds": (
        lambda task: task.method.config().warmup_rounds >= task.round.rounds,
        "method.warmup_rounds must be below round.rounds = {round.rounds}",
    ),
    "task.accumulate-needs-device": (
        lambda task: task.privacy.unit == "record" and task.method.config().accumulate > 1,
        "method.accumulate: with privacy.unit = 'record' each record's gradient is computed alone, so a larger batch "
        "takes no more memory; set method.batch_size, by which steps are charged",
    ),
    "task.own-loss-needs-no-teacher": (
        lambda task: task.model.own_loss and task.parts().training.objective.distills,
        "model.loss = {model.loss!r}: method.name = {method.name!r} teaches by a loss of its own; take another method, "
        "or the loss 'cross-entropy'",
    ),
    "task.moments-are-summed-once": (
        lambda task: (
            task.model.name == "second-moments"
            and task.statistic is None
            and (task.method.name, task.round.rounds, task.method.config().local_steps) != ("second-moments", 1, 1)
        ),
        "model.name = 'second-moments' is one sum of what one step from zero computes: take method.name = "
        "'second-moments' with its own settings, and round.rounds = 1",
    ),
    "task.augment-needs-images": (
        lambda task: (
            task.data.augment != "none"
            and task.model.has_features
            and {"found": "share = 'head'" if task.model.features is None else f"features = {task.model.features!r}"}
        ),
        "data.augment = {data.augment!r}: with model.{found} each image's features are computed once, so images cannot "
        "be changed from step to step; leave one of them out",
    ),
    "task.window-needs-noise-of-empty": (  # a decline reveals that a device has no new samples
        lambda task: (
            task.data.window_s
            and task.privacy.unit != "record"
            and not (task.parts().takes_empty and task.noises_updates)
        ),
        "data.window = {data.window!r}: with method.name = {method.name!r} a device without new samples would have to "
        'decline, which tells that none have arrived; take "hush" with noise, or privacy.unit = "record"',
    ),
    "task.preferences-need-method": (
        lambda task: task.privacy.preference_std > 0 and task.parts().max_preference is None,
        "privacy.preference_std = {privacy.preference_std:g}: with method.name = {method.name!r} all devices add the "
        "same noise; leave it out, or take 'apdp-fl'",
    ),
    "task.codec-needs-noise": (
        lambda task: (
            not task.noises_updates
            and codec_of(task.wire.codec).needs_noise
            and {"needs": codec_of(task.wire.codec).needs_noise}
        ),
        'wire.codec = "{wire.codec}" {needs}, and here no noise is added to the update; use "quantized", or '
        'privacy.unit = "device" with noise',
    ),
    "task.aggregation-of-method": (
        lambda task: (
            task.round.aggregation != "mean" and type(task.parts().server).aggregate is not ServerHalf.aggregate
        ),
        "round.aggregation = {round.aggregation!r}: method.name = {method.name!r} aggregates in its own way; take "
        "'mean'",
    ),
    "task.aggregation-of-equals": (
        lambda task: task.round.aggregation != "mean" and task.parts().server.weighs,
        "round.aggregation = {round.aggregation!r} gives every update the same weight, and {method.name!r} weighs "
        "them; switch that off (dp-fedsim: method.msa = false), or keep the mean",
    ),
    "task.patience-of-method": (
        lambda task: task.round.patience and type(task.parts().server).final is not ServerHalf.final,
        "round.patience = {round.patience}: method.name = {method.name!r} ends with what it makes of its last rounds, "
        "so it cannot end sooner; leave patience out",
    ),
    "task.delta-too-large": (  # the number of records of a device is not known before the data are
        lambda task: task.privacy.unit != "record" and _error(lambda: _check_delta(task)),
        "privacy.delta = {delta:g}: {error}; to repeat a paper with its own delta write privacy.accounting = "
        '"as-published"',
    ),
    "task.two-questions": (
        lambda task: task.evaluation is not None and task.statistic is not None,
        "evaluation and statistic: a task has one of them; a statistic has no training to evaluate",
    ),
    "task.question-needs-device": (
        lambda task: (
            _question(task)
            and (task.privacy.unit != "device" or task.privacy.accounting == "as-published")
            and {"question": _question(task)}
        ),
        "{question}: an answer protects a whole device; it needs privacy.unit = 'device' and privacy.accounting = "
        "'strict' or 'secure'",
    ),
    "task.question-not-buffered": (
        lambda task: _question(task) and not task.round.has_cohort and {"question": _question(task)},
        'round.mode = "buffered": {question} asks all devices in one round, and a buffer has whoever comes; take mode '
        '= "synchronous"',
    ),
    "task.statistic-has-one-round": (
        lambda task: task.statistic and task.round.rounds != 1,
        "round.rounds = {round.rounds}: a statistic has one round, so set rounds = 1",
    ),
    "task.statistic-trains-none": (  # a task that reconstructs has samples without labels, and no linear model
        lambda task: (
            task.statistic
            and (
                task.model.has_features
                or (task.model.name != "linear" and not find_loss(task.model.standard_loss).of_inputs)
            )
        ),
        "model: a statistic trains none; write name = 'linear', and nothing else",
    ),
    "task.evaluation-needs-heads": (
        lambda task: task.evaluation and not (task.model.has_features and task.targets.are_classes),
        "evaluation: boards compare heads on fixed features, which they can train alone in a second; it needs classes, "
        "and model.features or model.share = 'head'",
    ),
    "task.evaluation-needs-all-rounds": (
        lambda task: task.evaluation and task.round.patience,
        "round.patience = {round.patience}: leave patience out, or evaluation",
    ),
    "task.evaluation-rounds": (
        lambda task: task.evaluation and task.total_rounds > MAX_ROUNDS,
        f"round.rounds = {{round.rounds}}: {{total_rounds}} with those that evaluate, and a task has at most "
        f"{MAX_ROUNDS}; take fewer, or a larger evaluation.every",
    ),
}
"""In the order in which they are checked."""
