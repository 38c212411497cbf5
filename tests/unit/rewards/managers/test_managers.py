# SPDX-License-Identifier: Apache-2.0
"""The managers that grade in processes of their own, on a batch."""

import os

import numpy as np
import pytest
import torch

from quadriga.config import Config, CustomRewardFunctionConfig, DataConfig, RewardModelConfig
from quadriga.errors import ConfigError, RewardError
from quadriga.protocol import DataProto
from quadriga.rewards import load_reward_manager
from tests.limits import GRADED_S

TEXTS = ["it is 5", "5 or 6", "", "raise", "5", "print(5)", "print(6)"]


class Words:
    """A tokenizer whose token ids are places in TEXTS; the id 99 pads."""

    def batch_decode(self, token_ids, skip_special_tokens):
        return [" ".join(TEXTS[token] for token in row if token < len(TEXTS)) for row in token_ids]


def batch(rows, lengths=None, response_length=4):
    lengths = lengths or [2] * len(rows)
    responses = torch.full((len(rows), response_length), 99)
    responses[:, 0] = torch.tensor(rows)
    mask = torch.cat(
        [torch.ones(len(rows), 1), torch.arange(response_length) < torch.tensor(lengths)[:, None]],
        dim=1,
    )
    non_tensors = {
        "data_source": np.array(["quadriga/largest"] * len(rows), dtype=object),
        "reward_model": np.array(
            [{"style": "rule", "ground_truth": "5"}] * len(rows), dtype=object
        ),
        "extra_info": np.array([{"index": row} for row in rows], dtype=object),
    }
    return DataProto.from_dict({"responses": responses, "attention_mask": mask.long()}, non_tensors)


@pytest.fixture
def manager(tmp_path):
    made = []

    def make(code=None, function_kwargs=None, **settings):
        custom = CustomRewardFunctionConfig()
        if code is not None:
            (tmp_path / "reward.py").write_text(code)
            custom = CustomRewardFunctionConfig(
                path=str(tmp_path / "reward.py"), reward_kwargs=function_kwargs or {}
            )
        config = Config(
            reward_model=RewardModelConfig(**{"max_error_rate": 0.5, **settings}),
            custom_reward_function=custom,
            data=DataConfig(),
        )
        made.append(load_reward_manager(config, Words()))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_naive_grades_by_data_source(manager):
    output = manager()(batch([0, 1, 2, 4]))
    assert output.scores.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0]]
    assert output.extra["pred"].tolist() == ["5", "6", None, "5"]
    assert output.metrics["reward/errors"].value == 0


def test_naive_runs_a_users_function(manager):
    code = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0, **kwargs):
    if solution_str == "raise":
        raise LookupError("nothing to grade")
    return {"score": float(solution_str.endswith(ground_truth)) + bonus, "index": extra_info["index"] + 0.0}
"""
    grade = manager(code, {"bonus": 0.5})
    with pytest.raises(RewardError, match="index in the dict"):
        grade(batch([0, 1]))
    grade = manager(code.replace('"index":', '"row":'), {"bonus": 0.5})
    output = grade(batch([0, 1, 3, 4]))
    assert output.scores.sum(dim=1).tolist() == [1.5, 0.5, 0.0, 1.5]
    assert output.extra["row"].tolist() == [0.0, 1.0, None, 4.0]
    assert output.extra["reward_error"][2].endswith("LookupError: nothing to grade")
    assert output.metrics["reward/error_rate"].value == 0.25


def test_naive_stops_above_the_error_rate(manager):
    code = "def compute_score(solution_str, **kwargs):\n    return None if solution_str == '5' else 1\n"
    assert manager(code, max_error_rate=0.5)(batch([0, 4])).metrics["reward/errors"].value == 1
    with pytest.raises(
        RewardError, match=r"1 of 2 samples .*row 1 .*returned None, expected a number"
    ):
        manager(code, max_error_rate=0.4)(batch([0, 4]))


def test_a_hung_function_is_counted_as_timeout(manager):
    code = "import time\ndef compute_score(solution_str, **kwargs):\n    return 1 if solution_str else time.sleep(60)\n"
    output = manager(code, timeout_s=2.0, num_workers=1)(batch([0, 2, 4]))
    assert output.scores.sum(dim=1).tolist() == [1, 0, 1]
    assert output.metrics["reward/timeouts"].value == 1


def test_of_a_hundred_grades_five_may_fail(manager):
    code = "def compute_score(solution_str, **kwargs):\n    return None if solution_str == '5' else 1\n"
    grade = manager(code, max_error_rate=RewardModelConfig().max_error_rate)
    assert grade(batch([4] * 5 + [0] * 95)).metrics["reward/errors"].value == 5
    with pytest.raises(RewardError, match=r"6 of 100 samples .*at most 5%"):
        grade(batch([4] * 6 + [0] * 94))


def test_a_row_that_cannot_be_graded_is_told_at_the_start(manager):
    """One of a data source without a grader, without a truth; a function of the user's and a model may need neither."""
    truth, own = {"ground_truth": "1"}, "def compute_score(**kwargs):\n    return 1\n"
    first, foreign = ("a row 0", "openai/gsm8k", truth), ("a row 7", "my/words", truth)
    with pytest.raises(RewardError, match=r"a row 7, its data source: got 'my/words'"):
        manager().check_rows([first, foreign])
    for model, words in (
        ({"ground_truth": None}, "got the ground truth None"),
        ({"style": ""}, "a dict with style"),
    ):
        with pytest.raises(
            RewardError, match=f"b row 3, column 'reward_model': {words}|got {words}"
        ):
            manager().check_rows([first, ("b row 3", "openai/gsm8k", model)])
    manager().check_rows([first, ("a row 1", "reasoning_gym/sums", {"ground_truth": None})])
    manager(own).check_rows([first, foreign, ("a row 2", "x", {"ground_truth": None})])
    with pytest.raises(RewardError, match="a row 2, column 'reward_model': got None"):
        manager(own).check_rows([first, ("a row 2", "x", None)])
    manager(enable=True).check_rows([first, foreign, ("a row 2", "x", None)])


def test_beside_a_reward_model_alone_there_is_nothing_to_grade_by(manager):
    data = batch([0, 1])
    data.non_tensor_batch["data_source"][:] = "nobody/knows"
    data.non_tensor_batch["reward_model"][:] = [{"style": "model"}, None]
    output = manager(enable=True)(data)
    assert output.scores.tolist() == [[0, 0, 0, 0]] * 2
    assert output.metrics["reward/errors"].value == 0
    # What a manager adds by itself stays.
    buffer = {"enable": True, "len": 2, "penalty_factor": 1.0, "log": True}
    shaped = manager(
        enable=True,
        reward_manager="dapo",
        reward_kwargs={"max_resp_len": 2, "overlong_buffer_cfg": buffer},
    )
    output = shaped(data)
    assert bool((output.scores.sum(-1) < 0).any())
    assert "acc" not in output.extra and "overlong_reward" in output.extra
    # A function of the user's is asked, and gets its ground truth.
    graded = manager(
        "def compute_score(ground_truth, **kwargs):\n    return len(ground_truth)\n", enable=True
    )
    assert graded(batch([0, 1])).scores.sum() > 0
    with pytest.raises(RewardError, match="expected a dict with 'ground_truth'"):
        graded(data)


def test_an_unknown_data_source_is_an_error(manager):
    data = batch([0])
    data.non_tensor_batch["data_source"][0] = "nobody/knows"
    with pytest.raises(RewardError, match="'nobody/knows'"):
        manager()(data)


def test_mistakes_in_the_configuration_show_at_construction(manager):
    with pytest.raises(ConfigError, match="takes the keyword arguments"):
        manager("def compute_score(text):\n    return 1\n")
    with pytest.raises(
        ConfigError,
        match=r"got max_resp_len, expected options of the reward manager naive \(it has none\)",
    ):
        manager(reward_kwargs={"max_resp_len": 4})
    with pytest.raises(
        RewardError,
        match="got limited, expected one of batch, dapo, in_process, judge, naive, prime",
    ):
        manager(reward_manager="limited")
    with pytest.raises(ConfigError, match="a function that grades lists"):
        manager(reward_manager="batch")


def test_batch_makes_one_call(manager):
    code = """
calls = []

def compute_score(data_sources, solution_strs, ground_truths, extra_infos):
    calls.append(len(solution_strs))
    return [{"score": text.endswith(truth), "calls": list(calls)} for text, truth in zip(solution_strs, ground_truths)]
"""
    grade = manager(code, reward_manager="batch")
    grade(batch([0, 1]))
    output = grade(batch([0, 1, 4]))
    assert output.scores.sum(dim=1).tolist() == [1, 0, 1]
    assert output.extra["calls"][2] == [2, 3]
    assert grade(batch([0])[:0]).scores.shape == (0, 4)


def test_a_batch_that_fails_is_an_error_of_every_sample(manager):
    code = """
import os

def compute_score(solution_strs, **kwargs):
    return os._exit(3) if len(solution_strs) > 2 else [0.5]
"""
    grade = manager(code, reward_manager="batch", max_error_rate=1.0)
    assert grade(batch([0])).scores.sum().item() == 0.5
    assert "expected a list of 2 scores" in grade(batch([0, 1])).extra["reward_error"][1]
    output = grade(batch([0, 1, 2]))
    assert output.metrics["reward/errors"].value == 3
    assert "exit status 3" in output.extra["reward_error"][2]


def dapo(penalty_factor=1.0, **buffer):
    buffer = {"enable": True, "len": 4, "penalty_factor": penalty_factor, "log": True, **buffer}
    return {
        "reward_manager": "dapo",
        "reward_kwargs": {"max_resp_len": 6, "overlong_buffer_cfg": buffer},
    }


def test_dapo_punishes_length_linearly(manager):
    """Free up to 6 - 4 = 2 tokens, then a quarter of the factor for each."""
    output = manager(**dapo(penalty_factor=2.0))(
        batch([0, 0, 1, 0], [1, 2, 4, 6], response_length=6)
    )
    assert output.scores.sum(dim=1).tolist() == [1.0, 1.0, -1.0, -1.0]
    assert output.extra["acc"].tolist() == [1.0, 1.0, 0.0, 1.0]
    assert output.extra["overlong_reward"].tolist() == [0.0, 0.0, -1.0, -2.0]
    assert output.extra["overlong"].tolist() == [False, False, True, True]


def test_dapo_without_the_buffer_is_naive(manager):
    output = manager(**dapo(enable=False))(batch([0, 1], [6, 6], response_length=6))
    assert output.scores.sum(dim=1).tolist() == [1.0, 0.0]
    assert "overlong" not in output.extra


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"len": 7}, "from 1 to max_resp_len=6"),
        ({"len": 0}, "got 0"),
        ({"length": 3}, "got length, expected only enable"),
    ],
)
def test_dapo_checks_its_options(manager, change, words):
    with pytest.raises(ConfigError, match=words):
        manager(**dapo(**change))


def test_prime_runs_programs_and_adds_acc(manager):
    data = batch([5, 6, 2])
    data.non_tensor_batch["data_source"][:] = "apps"
    data.non_tensor_batch["reward_model"][:] = [
        {"ground_truth": '{"inputs": [""], "outputs": ["5"]}'}
    ] * 3
    output = manager(reward_manager="prime", timeout_s=GRADED_S)(data)
    assert output.scores.sum(dim=1).tolist() == [1.0, 0.0, 0.0]
    assert output.extra["acc"].tolist() == [1.0, 0.0, 0.0]
    assert output.extra["reason"].tolist()[0] == ""
    assert "wrong answer" in output.extra["reason"][1]
    assert output.metrics["reward/extra/pass_rate"].value == pytest.approx(1 / 3)


def test_prime_grades_side_by_side(manager):
    code = """
import os, pathlib, time

def compute_score(solution_str, **kwargs):
    folder = pathlib.Path(__file__).parent
    (folder / f"process-{os.getpid()}").touch()
    while len(list(folder.glob("process-*"))) < 2:
        time.sleep(0.01)
    return {"score": 1, "process": os.getpid()}
"""
    kwargs = {"num_processes": 3, "timeout_s": GRADED_S}
    output = manager(code, reward_manager="prime", reward_kwargs=kwargs)(batch([0] * 6))
    assert output.extra["acc"].tolist() == [1.0] * 6
    assert len(set(output.extra["process"])) > 1
    assert os.getpid() not in output.extra["process"]


def test_prime_keeps_its_own_time_limit(manager):
    code = """
import time

def compute_score(solution_str, **kwargs):
    time.sleep(3600 if solution_str == "raise" else 0)
    return 1
"""
    kwargs = {"num_processes": 1, "timeout_s": 1.0}
    grade = manager(
        code, reward_manager="prime", reward_kwargs=kwargs, timeout_s=999.0, max_error_rate=0.5
    )
    output = grade(batch([0, 0, 3]))
    assert output.metrics["reward/timeouts"].value == 1
    assert output.extra["acc"].tolist() == [1.0, 1.0, None]


@pytest.mark.parametrize("kwargs", [{"num_processes": 0}, {"timeout_s": -1}, {"num_workers": 3}])
def test_prime_checks_its_options(manager, kwargs):
    with pytest.raises(ConfigError, match=next(iter(kwargs))):
        manager(reward_manager="prime", reward_kwargs=kwargs)
