# SPDX-License-Identifier: Apache-2.0
"""The calls that verl's documents show, made as they stand there: one function a group of calls that belong together.

Each is the fact of an interface, in words of our own. `test_their_number` prints how many there are, and which forms
need something else to be written.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tokenizers import Tokenizer, models, pre_tokenizers
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import PreTrainedTokenizerFast

from quadriga.config import Config, DataConfig
from quadriga.errors import DataError, ProtocolError
from quadriga.single_controller import ClassWithInitArgs, LocalWorkerGroup

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
WORDS = ["<pad>", "<eos>", "<unk>", "<user>", *(f"w{number}" for number in range(20))]
INSTEAD = {
    "verl.trainer.ppo.ray_trainer.RayPPOTrainer": "quadriga verl main_ppo",
    "verl.utils.tracking.Tracking": "trainer.logger",
}
"""Name -> what the error about it says to use."""
SNIPPETS: list[Callable[..., None]] = []


def snippet(function: Callable[..., None]) -> Callable[..., None]:
    """One group of calls."""
    SNIPPETS.append(function)
    return function


class Place:
    """What the calls need: a tokenizer, a file of rows, and the section `data`."""

    def __init__(self, folder: Path) -> None:
        backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokens = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **tokens)
        self.tokenizer.chat_template = TEMPLATE
        self.folder, self.file = folder, str(folder / "rows.jsonl")
        rows = [
            {
                "data_source": "exact_match",
                "prompt": [{"role": "user", "content": " ".join(f"w{i}" for i in range(1, length + 1))}],
                "reward_model": {"style": "rule", "ground_truth": "w1"},
                "extra_info": {"split": "train", "index": length},
            }
            for length in (1, 2, 3, 9)
        ]
        Path(self.file).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def config(self, **values: Any) -> DataConfig:
        given = {"max_prompt_length": 6, "filter_overlong_prompts": True, "cache_dir": str(self.folder / "cache")}
        return DataConfig(**{**given, **values})

    def batch(self) -> Any:
        """Two prompts of two responses each, the second of a group two tokens long."""
        from verl import DataProto

        masks = torch.tensor([[1, 1, 1], [1, 1, 0]] * 2)
        tensors = {
            "responses": torch.tensor([[4, 5, 1], [6, 1, 0]] * 2),
            "attention_mask": torch.cat([torch.ones(4, 2, dtype=torch.int64), masks], dim=1),
            "old_log_probs": torch.full((4, 3), -1.0),
            "ref_log_prob": torch.full((4, 3), -1.5),
            "token_level_scores": torch.tensor([[0.0, 0, 1], [0, 0, 0]] * 2),
            "values": torch.zeros(4, 3),
        }
        uids = np.array(["a", "a", "b", "b"], dtype=object)
        return DataProto.from_dict(tensors=tensors, non_tensors={"uid": uids})


@snippet
def a_data_set_by_its_constructor(place: Place) -> None:
    from verl.utils.dataset.rl_dataset import RLHFDataset

    rows = RLHFDataset(data_files=place.file, tokenizer=place.tokenizer, processor=None, config=place.config())
    assert len(rows) == len(rows.dataframe) == 3  # the fourth is too long
    (row,) = rows.__getitems__([1])
    assert row["attention_mask"].tolist() == [0, 0, 0, 1, 1, 1] and row["position_ids"].tolist() == [0, 0, 0, 0, 1, 2]
    assert row["raw_prompt"][0]["content"] == "w1 w2" and row["index"] == 2


@snippet
def a_data_set_by_its_function(place: Place) -> None:
    from verl.trainer.main_ppo import create_rl_dataset, create_rl_sampler

    config = place.config(train_max_samples=2, shuffle=False)
    count = config.get("train_max_samples", -1)
    rows = create_rl_dataset(place.file, config, place.tokenizer, None, is_train=True, max_samples=count)
    assert list(create_rl_sampler(config, rows)) == [0, 1]


@snippet
def a_class_of_ones_own(place: Place) -> None:
    """It reads the section as a mapping, and keys that are its own."""
    text = (
        "from verl.utils.dataset.rl_dataset import RLHFDataset\n\n\n"
        "class Loud(RLHFDataset):\n"
        "    def __init__(self, data_files, tokenizer, config, processor=None, **others):\n"
        "        super().__init__(data_files, tokenizer, config, processor)\n"
        '        self.key, self.sign = config.get("prompt_key", "prompt"), config.get("sign", "?")\n'
        '        self.limit = config["max_prompt_length"] if "max_prompt_length" in config else 0\n\n'
        "    def _build_messages(self, example):\n"
        '        return [{**one, "content": one["content"] + " w19"} for one in example[self.prompt_key]]\n'
    )
    (place.folder / "loud.py").write_text(text)
    from verl.trainer.main_ppo import create_rl_dataset

    own = {"path": str(place.folder / "loud.py"), "name": "Loud", "options": {"sign": "!"}}
    config = place.config(custom_cls=own)
    assert "custom_cls" in config and config.custom_cls.get("path", None) is not None
    rows = create_rl_dataset(place.file, config, place.tokenizer, None, is_train=True)
    assert (rows.key, rows.sign, rows.limit) == ("prompt", "!", 6)
    assert rows[0]["raw_prompt"][0]["content"] == "w1 w19"


@snippet
def a_class_loaded_from_a_file(place: Place) -> None:
    from verl.utils.import_utils import load_extern_type

    (place.folder / "own.py").write_text("class Own:\n    pass\n")
    assert load_extern_type(str(place.folder / "own.py"), "Own").__name__ == "Own"


@snippet
def a_curriculum(place: Place) -> None:
    from verl.experimental.dataset.sampler import AbstractCurriculumSampler

    class Backwards(AbstractCurriculumSampler):
        def __init__(self, data_source: Any, data_config: Any) -> None:
            super().__init__(data_source, data_config)
            self.seen = 0

        def __len__(self) -> int:
            return len(self.data_source)

        def __iter__(self):
            return iter(reversed(range(len(self))))

        def update(self, batch: Any) -> None:
            self.seen += len(batch)

    sampler = Backwards(data_source=[1, 2, 3], data_config=place.config())
    sampler.update(batch=place.batch())
    assert (list(sampler), sampler.seen) == ([2, 1, 0], 4)


@snippet
def rows_that_are_generated(place: Place) -> None:
    text = (
        "from verl.utils.dataset.dynamicgen_dataset import AbstractDataGenerator\n\n\n"
        "class Again(AbstractDataGenerator):\n"
        "    def generate(self, dataset):\n"
        "        return dataset.dataframe.select([0])\n"
    )
    (place.folder / "again.py").write_text(text)
    from verl.trainer.main_ppo import create_rl_dataset
    from verl.utils.dataset.dynamicgen_dataset import DynamicGenDataset

    config = place.config(datagen={"path": str(place.folder / "again.py"), "name": "Again"})
    assert "datagen" in config and config.datagen.get("path", None) is not None
    rows = create_rl_dataset(place.file, config, place.tokenizer, None, is_train=True)
    assert type(rows) is DynamicGenDataset and len(rows) == 3
    rows.on_batch_end(batch=place.batch())
    assert len(rows) == 4 and rows[3]["input_ids"].tolist() == rows[0]["input_ids"].tolist()


@snippet
def rows_become_a_batch(place: Place) -> None:
    from verl import DataProto
    from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

    rows = RLHFDataset(data_files=place.file, tokenizer=place.tokenizer, config=place.config())
    loader = StatefulDataLoader(dataset=rows, batch_size=2, num_workers=0, drop_last=True, collate_fn=collate_fn)
    (batch_dict,) = loader
    batch = DataProto.from_single_dict(batch_dict)
    assert batch.batch["input_ids"].shape == (2, 6) and batch.non_tensor_batch["index"].tolist() == [1, 2]
    assert batch_dict["extra_info"].dtype == object and batch_dict["extra_info"].shape == (2,)


@snippet
def padding_and_cutting(place: Place) -> None:
    from verl.utils import torch_functional as verl_F

    ids = torch.tensor([[1, 2, 3, 4]])
    options = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    cut = {
        side: verl_F.postprocess_data(input_ids=ids, max_length=3, truncation=side, **options)[0].tolist()
        for side in ("left", "right", "middle")
    }
    assert cut == {"left": [[2, 3, 4]], "right": [[1, 2, 3]], "middle": [[1, 3, 4]]}
    longer, mask = verl_F.postprocess_data(input_ids=ids, max_length=6, left_pad=True, truncation="error", **options)
    assert (longer.tolist(), mask.tolist()) == ([[0, 0, 1, 2, 3, 4]], [[0, 0, 1, 1, 1, 1]])
    with pytest.raises(DataError, match="4 tokens"):
        verl_F.postprocess_data(input_ids=ids, max_length=3, truncation="error", **options)
    assert verl_F.pad_sequence_to_length(ids, 6, 9, left_pad=False).tolist() == [[1, 2, 3, 4, 9, 9]]
    assert verl_F.pad_sequence_to_length(ids, 6, 9, left_pad=True).tolist() == [[9, 9, 1, 2, 3, 4]]


@snippet
def masks_and_positions(place: Place) -> None:
    from verl.utils import torch_functional as verl_F
    from verl.utils.model import compute_position_id_with_mask

    assert compute_position_id_with_mask(torch.tensor([[0, 0, 1, 1, 1]])).tolist() == [[0, 0, 0, 1, 2]]
    responses = torch.tensor([[5, 1, 0, 0], [5, 6, 7, 8]])
    assert verl_F.get_eos_mask(response_id=responses, eos_token=1).tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    several = verl_F.get_response_mask(response_id=responses, eos_token=[1, 7], dtype=torch.bool)
    assert several.sum(-1).tolist() == [2, 3]
    assert float(verl_F.masked_mean(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1, 1, 0]))) == 2.0
    zeros = torch.zeros(3)
    assert verl_F.clip_by_value(torch.tensor([-2.0, 0.5, 2.0]), zeros - 1, zeros + 1).tolist() == [-1.0, 0.5, 1.0]


@snippet
def a_batch_of_tensors_and_objects(place: Place) -> None:
    from verl import DataProto

    data = DataProto(
        batch=TensorDict({"x": torch.arange(4)}, batch_size=[4]),
        non_tensor_batch={"name": np.array(list("abcd"), dtype=object)},
        meta_info={"step": 1},
    )
    assert [len(part) for part in data.chunk(chunks=2)] == [2, 2]
    assert DataProto.concat(data.chunk(chunks=2)).non_tensor_batch["name"].tolist() == list("abcd")
    assert data.to("cpu").batch["x"].device.type == "cpu"
    assert data[1:3].batch["x"].tolist() == [1, 2] and data.select_idxs([3]).batch["x"].tolist() == [3]
    with pytest.raises(ProtocolError, match="expected 4 rows"):
        DataProto(batch=data.batch, non_tensor_batch={"short": np.array(["a"], dtype=object)})


@snippet
def prompts_leave_and_responses_come(place: Place) -> None:
    from verl import DataProto

    tensors = {"input_ids": torch.arange(2)[:, None], "attention_mask": torch.ones(2, 1)}
    batch = DataProto.from_dict(tensors=tensors, non_tensors={"uid": np.array(["a", "b"], dtype=object)})
    gen_batch = batch.pop(batch_keys=["input_ids", "attention_mask"])
    assert not batch.batch.keys() and gen_batch.batch["input_ids"].tolist() == [[0], [1]]
    repeated = gen_batch.repeat(repeat_times=2, interleave=True)
    batch = batch.repeat(repeat_times=2, interleave=True).union(repeated)
    assert batch.batch["input_ids"].flatten().tolist() == [0, 0, 1, 1]
    assert batch.non_tensor_batch["uid"].tolist() == ["a", "a", "b", "b"]


@snippet
def padding_to_a_divisor(place: Place) -> None:
    from verl.protocol import pad_dataproto_to_divisor, unpad_dataproto

    padded, size = pad_dataproto_to_divisor(place.batch(), 3)
    assert (len(padded), size) == (6, 2) and len(unpad_dataproto(padded, pad_size=size)) == 4


@snippet
def workers_and_dispatch_modes(place: Place) -> None:
    from verl import DataProto
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, Execute, register

    class Twice(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def generate_sequences(self, data: DataProto) -> DataProto:
            return DataProto.from_dict(tensors={"y": data.batch["values"] + self.rank})

        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def which(self) -> int:
            return self.rank

        @register(dispatch_mode=Dispatch.RANK_ZERO, execute_mode=Execute.RANK_ZERO)
        def first(self, one: int) -> int:
            return one + self.rank

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
        def later(self, data: DataProto) -> DataProto:
            return self.generate_sequences(data)

    group = LocalWorkerGroup(ClassWithInitArgs(Twice))
    assert group.generate_sequences(place.batch()).batch["y"].shape == (4, 3)
    assert group.which() == [0] and group.first(3) == 3
    assert len(group.later(place.batch()).get()) == 4
    assert all(hasattr(Dispatch, name) for name in ("ALL_TO_ALL", "DP_COMPUTE", "DP_COMPUTE_PROTO_WITH_FUNC"))


@snippet
def dispatch_by_its_functions(place: Place) -> None:
    from verl.single_controller.base.decorator import collect_dp_compute_data_proto, dispatch_dp_compute_data_proto

    from quadriga.single_controller.dispatch import GroupLayout

    group, batch = GroupLayout(2), place.batch()
    (parts,), named = dispatch_dp_compute_data_proto(group, batch)
    assert [len(part) for part in parts] == [2, 2] and named == {}
    assert collect_dp_compute_data_proto(group, parts).batch["values"].shape == batch.batch["values"].shape


@snippet
def a_mode_of_ones_own(place: Place) -> None:
    from verl.single_controller.base.decorator import Dispatch, register_dispatch_mode, update_dispatch_mode

    if "SHOWN_TO_ALL" not in Dispatch.members:
        register_dispatch_mode("SHOWN_TO_ALL")
    mode = Dispatch.SHOWN_TO_ALL
    update_dispatch_mode(mode, lambda group, one: ([[one] * group.world_size], {}), lambda group, outputs: outputs)
    assert mode.dispatch_fn is not None
    Dispatch.members.pop("SHOWN_TO_ALL")


@snippet
def roles_and_pools(place: Place) -> None:
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, create_colocated_worker_cls
    from verl.single_controller.ray.base import RayWorkerGroup
    from verl.trainer.ppo.ray_trainer import ResourcePoolManager, Role

    from quadriga.single_controller import Worker

    together = create_colocated_worker_cls({"actor": RayClassWithInitArgs(cls=Worker)})
    assert list(together.cls.roles) == ["actor"] and callable(RayWorkerGroup)
    pools = ResourcePoolManager(resource_pool_spec={"all": [2]}, mapping={Role.ActorRollout: "all", Role.Critic: "all"})
    assert pools.get_n_gpus() == 2 and RayResourcePool([1, 1]).world_size == 2


@snippet
def the_mask_of_responses(place: Place) -> None:
    from verl.trainer.ppo.ray_trainer import compute_response_mask

    assert compute_response_mask(place.batch()).tolist() == [[1, 1, 1], [1, 1, 0]] * 2


@snippet
def rewards_by_a_manager(place: Place) -> None:
    from verl.trainer.ppo.reward import compute_reward

    def graded(data: Any, return_dict: bool = False) -> Any:
        rewards = data.batch["token_level_scores"]
        return {"reward_tensor": rewards, "reward_extra_info": {"acc": [1] * len(data)}} if return_dict else rewards

    reward_tensor, reward_extra_infos_dict = compute_reward(place.batch(), graded)
    assert reward_tensor.sum() == 2 and reward_extra_infos_dict == {"acc": [1] * 4}


@snippet
def a_penalty_in_the_reward(place: Place) -> None:
    from verl.trainer.ppo.core_algos import get_kl_controller
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_response_mask

    batch = place.batch()
    batch.batch["response_mask"] = compute_response_mask(batch)
    control = get_kl_controller(Config(algorithm={"kl_ctrl": {"kl_coef": 0.2}}).algorithm.kl_ctrl)
    batch, metrics = apply_kl_penalty(batch, kl_ctrl=control, kl_penalty="kl")
    # Half a nat for each token, times 0.2.
    assert batch.batch["token_level_rewards"][0].tolist() == pytest.approx([-0.1, -0.1, 0.9])
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)


@snippet
def advantages_of_a_batch(place: Place) -> None:
    from verl.trainer.ppo.core_algos import AdvantageEstimator
    from verl.trainer.ppo.ray_trainer import compute_advantage

    config = Config().algorithm
    for estimator, expected in ((AdvantageEstimator.GRPO, 0.5), (AdvantageEstimator.GAE, None)):
        batch = place.batch()
        batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        options = {"gamma": 1.0, "lam": 1.0, "num_repeat": 2, "norm_adv_by_std_in_grpo": False}
        batch = compute_advantage(batch, adv_estimator=estimator, **options, config=config)
        assert batch.batch["advantages"].shape == batch.batch["returns"].shape == (4, 3)
        if expected is not None:
            assert batch.batch["advantages"][0].tolist() == [expected] * 3


@snippet
def losses_by_their_functions(place: Place) -> None:
    from verl.trainer.ppo.core_algos import agg_loss, compute_value_loss

    mask = torch.tensor([[1, 1], [1, 0]])
    assert float(agg_loss(loss_mat=torch.ones(2, 2), loss_mask=mask, loss_agg_mode="token-mean")) == 1.0
    vf_loss, clipped = compute_value_loss(
        vpreds=torch.ones(2, 2),
        values=torch.zeros(2, 2),
        returns=torch.zeros(2, 2),
        response_mask=mask,
        cliprange_value=0.5,
        loss_agg_mode="token-mean",
    )
    assert (float(vf_loss), float(clipped)) == (0.5, 0.0)


@snippet
def metrics_of_a_step(place: Place) -> None:
    from verl.trainer.ppo.metric_utils import (
        compute_data_metrics,
        compute_throughout_metrics,
        compute_timing_metrics,
    )
    from verl.trainer.ppo.ray_trainer import compute_response_mask

    batch, seconds = place.batch(), {"step": 2.0, "gen": 0.5}
    batch.batch["response_mask"] = compute_response_mask(batch)
    for name in ("token_level_rewards", "advantages", "returns"):
        batch.batch[name] = batch.batch["token_level_scores"]
    found = compute_data_metrics(batch=batch, use_critic=True)
    assert found["critic/score/mean"] == 0.5 and found["response_length/max"] == 3 and "critic/values/mean" in found
    assert "critic/values/mean" not in compute_data_metrics(batch=batch, use_critic=False)
    times = compute_timing_metrics(batch=batch, timing_raw=seconds)
    assert times["timing_s/gen"] == 0.5 and times["timing_per_token_ms/gen"] == pytest.approx(50.0)
    speed = compute_throughout_metrics(batch=batch, timing_raw=seconds, n_gpus=2)
    assert speed["perf/total_num_tokens"] == 18 and speed["perf/throughput"] == 4.5


@snippet
def metrics_are_gathered(place: Place) -> None:
    from verl.utils.metric import reduce_metrics
    from verl.utils.profiler import marked_timer
    from verl.utils.py_functional import append_to_dict

    metrics: dict[str, list[float]] = {}
    for loss in (1.0, 3.0):
        append_to_dict(metrics, {"actor/loss": loss, "actor/max": loss})
    assert reduce_metrics(metrics) == {"actor/loss": 2.0, "actor/max": 3.0}
    timing_raw: dict[str, float] = {}
    with marked_timer("gen", timing_raw):
        pass
    assert timing_raw["gen"] >= 0.0


@pytest.mark.usefixtures("verl_names")
@pytest.mark.parametrize("calls", SNIPPETS, ids=lambda one: one.__name__)
def test_it_runs(calls: Callable[..., None], tmp_path: Path) -> None:
    calls(Place(tmp_path))


@pytest.mark.usefixtures("verl_names")
@pytest.mark.parametrize("name", INSTEAD)
def test_what_is_written_instead_is_told(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    with pytest.raises(ImportError, match=INSTEAD[name]):
        exec(f"from {module} import {attribute}")


def test_their_number() -> None:
    print(f"\n{len(SNIPPETS)} groups of calls run as they stand; {len(INSTEAD)} need something else to be written")
    assert len(INSTEAD) <= 5 <= len(SNIPPETS)
