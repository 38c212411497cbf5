# SPDX-License-Identifier: Apache-2.0
"""The table of algorithms: names, signatures, options, columns, and calling an estimator on a batch."""

from enum import Enum
from pathlib import Path

import pytest
import torch

from quadriga.algorithms.registry import (
    ADVANTAGES,
    BATCH_COLUMNS,
    POLICY_LOSSES,
    AdvantageEstimator,
    Registry,
    bind_options,
    check_losses,
    choose_estimator,
    choose_policy_loss,
    estimate_advantages,
    get_adv_estimator_fn,
    options,
    required_fields,
)
from quadriga.declared_algorithms import loss_options, read_declarations
from quadriga.errors import ConfigError
from quadriga.user_file import import_external


def estimator(rewards):
    """Not yet known to anyone."""
    return rewards, rewards


def test_register_and_get() -> None:
    """The decorator gives the function back unchanged, and registering it again is no clash."""
    registry = Registry("key")
    assert registry.register("mine")(estimator) is estimator
    assert registry.register("mine")(estimator) is estimator
    assert registry.find("mine") is estimator and list(registry) == ["mine"]


def test_the_name_may_be_a_member_of_a_string_enum() -> None:
    """Its value is the name, as in verl, whose enum is `class AdvantageEstimator(str, Enum)`."""

    class Name(str, Enum):  # noqa: UP042
        MINE = "mine"

    registry = Registry("key")
    registry.register(Name.MINE)(estimator)
    assert list(registry) == ["mine"] and registry.find(Name.MINE) is estimator


def test_unknown_name() -> None:
    """The key, what there is, and the nearest name."""
    with pytest.raises(
        ConfigError, match=r"algorithm.adv_estimator: got 'grop', .*grpo.* Did you mean 'grpo'"
    ):
        ADVANTAGES.find("grop")


def test_one_function_per_name() -> None:
    """Taking a name that is taken is an error that names both functions."""
    registry = Registry("key")
    registry.register("mine")(estimator)
    with pytest.raises(ConfigError, match="one function per name"):
        registry.register("mine")(lambda rewards: rewards)


def test_open_signature_is_refused_at_once() -> None:
    """Not when training has begun."""
    with pytest.raises(ConfigError, match=r"\*\*settings"):
        Registry("key").register("mine")(lambda rewards, **settings: rewards)


def test_names_of_the_enum_are_registered() -> None:
    """verl's users write members of it; each works as a name. An estimator need not be a member."""
    assert {member.value for member in AdvantageEstimator} <= set(ADVANTAGES)
    assert get_adv_estimator_fn(AdvantageEstimator.GRPO) is get_adv_estimator_fn("grpo")
    assert "vanilla" in set(POLICY_LOSSES)


def test_declarations_are_what_is_registered() -> None:
    """The source says the same as the registries, which need torch."""
    registries = {
        "register_adv_est": ADVANTAGES,
        "register_policy_loss": POLICY_LOSSES,
        "register_batch_column": BATCH_COLUMNS,
    }
    for decorator, registry in registries.items():
        for name, declaration in read_declarations(decorator).items():
            assert declaration.fields == required_fields(registry[name])
            assert set(declaration.options) <= set(options(registry[name]))
    losses = read_declarations("register_policy_loss")
    assert losses.keys() == POLICY_LOSSES.built_in
    flagged = {name for name, loss in losses.items() if "needs_advantage" in loss.flags}
    assert flagged == POLICY_LOSSES.needing_advantage
    assert loss_options()["clip_cov"] == ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")


def test_function_of_a_file(tmp_path: Path) -> None:
    """A file needs no decorator, may be loaded twice, and its signature is checked."""
    file = tmp_path / "own.py"
    file.write_text(
        "def plain(rewards):\n    return rewards, rewards\n"
        "def unclear(rewards, scale=1):\n    return rewards, rewards\n"
    )
    assert get_adv_estimator_fn(f"{file}:plain")(3) == (3, 3)
    assert get_adv_estimator_fn(f"{file}:plain")(3) == (3, 3)
    with pytest.raises(ConfigError, match="name of the function to take"):
        get_adv_estimator_fn(str(file))
    with pytest.raises(
        ConfigError, match=r"adv_estimator: got no function 'plane'.*Did you mean 'plain'"
    ):
        get_adv_estimator_fn(f"{file}:plane")
    with pytest.raises(ConfigError, match="'scale' with a default"):
        get_adv_estimator_fn(f"{file}:unclear")


def example(rewards, mask, /, uid, *, scale, shift=1):
    """Two ways to be positional, two options."""
    return rewards, mask, uid, scale, shift


def test_fields_and_options() -> None:
    """Positional parameters are fields, keyword-only ones options, and binding changes neither."""
    assert required_fields(example) == ("rewards", "mask", "uid")
    assert options(example) == ("scale", "shift")
    assert required_fields(bind_options(example, {"scale": 2})) == ("rewards", "mask", "uid")


def test_bound_values() -> None:
    """What is given goes before what is shared; what is shared and unknown is left alone."""
    bound = bind_options(example, {"scale": 2}, shared={"scale": 3, "shift": 4, "other": 5})
    assert bound("r", "m", "u") == ("r", "m", "u", 2, 4)


def test_unknown_option() -> None:
    """The nearest names are offered."""
    with pytest.raises(
        ConfigError, match=r"algorithm: got the option 'sclae'.* Did you mean 'scale'\?"
    ):
        bind_options(example, {"sclae": 2})
    with pytest.raises(ConfigError, match="this algorithm has none"):
        bind_options(lambda rewards: rewards, {"sclae": 2})


def test_option_without_a_value() -> None:
    """An option without a default must come from somewhere."""
    with pytest.raises(ConfigError, match="no value for the option 'scale'"):
        bind_options(example, {"shift": 2})


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda rewards, *rest: rewards, r"a function with \*rest"),
        (lambda rewards, **settings: rewards, r"a function with \*\*settings"),
        (lambda rewards, scale=1: rewards, r"'scale' with a default.*Put a `\*` before 'scale'"),
    ],
)
def test_open_signatures_are_refused(function, message: str) -> None:
    """What cannot be asked of the signature cannot be provided."""
    with pytest.raises(ConfigError, match=message):
        Registry("here").register("x")(function)


ACTOR = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0, "entropy_coeff": 0.0}


def test_options_go_where_they_belong() -> None:
    """Those of the loss's column are the loss's own in the configuration."""
    loss = choose_policy_loss("clip_cov", {"clip_cov_lb": 0.1, "clip_cov_ratio": 1.0}, ACTOR)
    assert set(loss.columns) == {"covariance_clipped"}
    assert loss.column_fields == {"old_log_prob", "advantages", "response_mask"}
    values = torch.tensor([[-1.0, -3.0]])
    columns = loss.compute_columns(
        {"old_log_prob": values, "advantages": values, "response_mask": torch.ones(1, 2)}
    )
    assert columns["covariance_clipped"].tolist() == [[1, 1]]


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("GSPO", {}, r"Did you mean 'gspo'\?"),
        ("ppo", {}, r"PPO is algorithm.adv_estimator=gae"),
        ("dapo", {}, r"got 'dapo'.* DAPO is .*clip_ratio_high=0.28.*filter_groups.enable=True"),
        ("gpso", {}, r"policy_loss.loss_mode: got 'gpso'.* Did you mean 'gspo'"),
        (
            "sapo",
            {"tau_poss": 1.0},
            r"policy_loss \(sapo\): got the option 'tau_poss', .*Did you mean 'tau_pos'",
        ),
        (
            "vanilla",
            {"tau_pos": 1.0},
            r"policy_loss \(vanilla\): got the option 'tau_pos', expected one of clip_ratio",
        ),
        ("gpg", {"tau_pos": 1.0}, "this algorithm has none"),
        ("clip_cov", {"clip_cov_up": 1.0}, "Did you mean 'clip_cov_ub'"),
    ],
)
def test_bad_choices_of_a_loss(name: str, given: dict, message: str) -> None:
    """Each with the nearest name, where there is one."""
    with pytest.raises(ConfigError, match=message):
        choose_policy_loss(name, given, ACTOR)


def test_bad_choices_of_an_estimator() -> None:
    """The same; an option without a default must be given."""
    with pytest.raises(ConfigError, match=r"adv_estimator: got 'gropo'.*'grpo'"):
        choose_estimator("gropo", {}, {})
    with pytest.raises(
        ConfigError, match=r"adv_options \(gpg\): got the option 'f_nrom', .*'f_norm'"
    ):
        choose_estimator("gpg", {"f_nrom": 1}, {})
    with pytest.raises(ConfigError, match="no value for the option 'gdpo_reward_keys'"):
        choose_estimator("gdpo", {}, {})


def test_given_goes_before_shared() -> None:
    """The section's setting is a default for the option."""
    estimator = choose_estimator(
        "grpo", {"epsilon": 0.0}, {"norm_adv_by_std_in_grpo": False, "gamma": 1.0}
    )
    advantages, _ = estimator.function(torch.tensor([[1.0], [0.0]]), torch.ones(2, 1), ["a", "a"])
    assert advantages.tolist() == [[0.5], [-0.5]]


def test_a_loss_of_ones_own(tmp_path: Path) -> None:
    """From a file, with options of its own; nothing is known of rows without an advantage, so all are computed."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def mine(log_prob, advantages, *, scale=1.0):\n    return -scale * advantages * log_prob, {}\n"
    )
    loss = choose_policy_loss(f"{file}:mine", {"scale": 2.0}, ACTOR)
    assert loss.fields == ("log_prob", "advantages") and not loss.needs_advantage
    assert loss.function(torch.ones(1), torch.ones(1))[0].item() == -2
    with pytest.raises(ConfigError, match="'scale'"):
        choose_policy_loss(f"{file}:mine", {"sacle": 2.0}, ACTOR)


@pytest.mark.parametrize("name", list(BATCH_COLUMNS))
def test_columns_of_the_batch(name: str) -> None:
    """0 outside the mask, whatever stands there; finite where nothing differs; the inputs are left alone."""
    column = bind_options(BATCH_COLUMNS[name])
    mask = torch.tensor([[1, 1, 0], [0, 0, 0]])
    values = torch.tensor([[-1.0, -2.0, float("nan")], [float("nan")] * 3])
    for gains in (values, values * 0 - 1):
        marks = column(values.clone(), gains, mask)
        assert (
            marks.shape == mask.shape
            and not marks[~mask.bool()].any()
            and torch.isfinite(marks).all()
        )


def test_traits() -> None:
    """A loss whose penalty does not ask for an advantage must see every row."""
    assert {
        name for name in POLICY_LOSSES if not choose_policy_loss(name, {}, ACTOR).needs_advantage
    } == {
        "dro",
        "kl_cov",
    }


FIELDS = {"response_mask": torch.tensor([[1, 1, 0], [1, 0, 0]]), "scores": torch.tensor([2.0, 3.0])}


def test_fields_by_name_and_mask() -> None:
    """The function gets what its parameters are called after; its result is 0 outside the mask."""

    def estimator(scores, response_mask):
        spread = scores[:, None].expand(response_mask.shape)
        return spread, spread + 1

    advantages, returns = estimate_advantages(estimator, FIELDS)
    assert advantages.tolist() == [[2, 2, 0], [3, 0, 0]]
    assert returns.tolist() == [[3, 3, 0], [4, 0, 0]]


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (
            lambda reward, response_mask: reward,
            "reads reward, expected .*: .*response_mask, rollout_is_weights, .*scores",
        ),
        (lambda scores: scores, "got a Tensor, expected two tensors"),
        (lambda scores: (scores, scores), r"advantages of shape \[2\], expected \[2, 3\]"),
        (
            lambda response_mask: (response_mask / 0, response_mask),
            "advantages that are not finite in 2 of 2",
        ),
    ],
)
def test_refused(estimator, message: str) -> None:
    """Each error names the key and the way out."""
    with pytest.raises(ConfigError, match=f"algorithm.adv_estimator: .*{message}"):
        estimate_advantages(estimator, FIELDS)


def test_index_is_the_group_as_in_verl() -> None:
    """Rows of two files may share their number; responses to one prompt share their uid."""

    def centred(token_level_rewards, response_mask, index):
        return token_level_rewards * torch.tensor([name == "a" for name in index])[
            :, None
        ], token_level_rewards

    mask = torch.ones(2, 1)
    fields = {
        "token_level_rewards": mask,
        "response_mask": mask,
        "uid": ["a", "b"],
        "index": [0, 0],
    }
    assert estimate_advantages(centred, fields)[0].tolist() == [[1.0], [0.0]]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            torch.tensor(1.0),
            r"'mine', its result: got a Tensor, expected \(losses, diagnostics\).*QUADRIGA_VERL",
        ),
        ((torch.tensor(1.0), 0.1, 0.2, 0.3), r"got a tuple of 4, expected \(losses, diagnostics\)"),
        (
            (torch.tensor(1.0), {}),
            r"got losses, a Tensor of shape \[\], expected a tensor of shape \[2, 3\].*the mean",
        ),
        (
            (torch.ones(2, 3), {"clipfrac": 0.1}),
            r"got clipfrac, a float, expected a tensor of shape \[2, 3\]",
        ),
    ],
)
def test_a_loss_is_per_token(result, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_losses("mine", result, torch.ones(2, 3))


def test_what_a_library_registers_is_known(tmp_path: Path) -> None:
    """From two spellings of one file, which is run once."""
    file = tmp_path / "library.py"
    file.write_text(
        "from quadriga.algorithms import register_adv_est\n\n\n"
        "@register_adv_est('of_a_library')\n"
        "def own(token_level_rewards, response_mask):\n    return token_level_rewards, token_level_rewards\n"
    )
    with pytest.raises(ConfigError, match="external_lib"):
        get_adv_estimator_fn("of_a_library")
    import_external([str(file), f"file://{file}"])
    assert get_adv_estimator_fn("of_a_library") is get_adv_estimator_fn(f"{file}:own")
    del ADVANTAGES["of_a_library"]
