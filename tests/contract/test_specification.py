# SPDX-License-Identifier: Apache-2.0
"""The calls that verl's documents show, made as they stand there: one function a group of calls that belong together.

Each is the fact of an interface, in words of our own. `test_their_number` prints how many there are, and which forms
need something else to be written.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import snippets_of_functions  # noqa: F401 (its calls are in the list)
import torch
from snippets import SNIPPETS, Place, snippet
from tensordict import TensorDict
from torchdata.stateful_dataloader import StatefulDataLoader

from quadriga.errors import ConfigError, ProtocolError
from quadriga.single_controller import ClassWithInitArgs, LocalWorkerGroup

INSTEAD = {
    "verl.utils.config.omega_conf_to_dataclass": "typed objects",
    "verl.trainer.ppo.reward.load_reward_manager": "Leave reward_fn out",
    "verl.trainer.main_generation.main": "quadriga verl main_generation",
    "verl.trainer.main_eval.main": "quadriga verl main_eval",
    "verl.workers.actor.DataParallelPPOActor": "update_actor",
    "verl.workers.critic.DataParallelPPOCritic": "update_critic",
    "verl.workers.rollout.vllm_rollout.vllm_rollout_spmd.vLLMRollout": "rollout.name=vllm",
    "verl.workers.rollout.sglang_rollout.sglang_rollout.SGLangRollout": "rollout.name=sglang",
    "verl.workers.rollout.hf_rollout.HFRollout": "rollout.name=hf",
    "verl.workers.sharding_manager.fsdp_vllm.FSDPVLLMShardingManager": "update_actor",
    "verl.workers.sharding_manager.fsdp_ulysses.FSDPUlyssesShardingManager": "ulysses",
    "verl.utils.rollout_skip.RolloutSkip": "actor_rollout_ref.rollout.skip",
    "verl.utils.checkpoint.checkpoint_manager.should_save_ckpt_esi": "trainer.esi_redundant_time",
    "verl.trainer.ppo.reward.compute_reward_async": "beside the models",
}
"""Name -> what the error about it says to use."""


@snippet
def a_data_set_by_its_constructor(place: Place) -> None:
    from verl.utils.dataset.rl_dataset import RLHFDataset

    rows = RLHFDataset(
        data_files=place.file, tokenizer=place.tokenizer, processor=None, config=place.config()
    )
    assert len(rows) == len(rows.dataframe) == 3  # the fourth is too long
    (row,) = rows.__getitems__([1])
    assert row["attention_mask"].tolist() == [0, 0, 0, 1, 1, 1] and row[
        "position_ids"
    ].tolist() == [0, 0, 0, 0, 1, 2]
    assert row["raw_prompt"][0]["content"] == "w1 w2" and row["index"] == 2


@snippet
def a_row_of_a_data_set(place: Place) -> None:
    """The section may be a dictionary or an OmegaConf tree; a row has tokens."""
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    keys = {"max_prompt_length": 6, "return_full_prompt": True, "use_shm": False}
    for config in (keys, OmegaConf.create(keys)):
        rows = RLHFDataset(data_files=place.file, tokenizer=place.tokenizer, config=config)
        assert len(rows) == 3
        assert rows[1]["attention_mask"].tolist() == [0, 0, 0, 1, 1, 1]
        assert rows[1]["full_prompts"] == "<user> w1 w2 "
    with pytest.raises(ConfigError, match="'max_prompt_length'"):
        RLHFDataset(place.file, place.tokenizer, {"max_prompt_lenght": 6})

    class Other(RLHFDataset):
        def __getitem__(self, item: int) -> dict[str, Any]:
            row = super().__getitem__(item)
            return {**row, "raw_prompt": [{"role": "user", "content": "w7"}], "sign": "!"}

    (row,) = Other(place.file, place.tokenizer, {**keys, "own": 1}).__getitems__([2])
    assert place.tokenizer.decode(row["raw_prompt_ids"]) == "<user> w7"
    assert (row["sign"], row["full_prompts"]) == ("!", "<user> w7 ")


@snippet
def a_data_set_by_its_function(place: Place) -> None:
    from verl.trainer.main_ppo import create_rl_dataset, create_rl_sampler

    config = place.config(train_max_samples=2, shuffle=False)
    count = config.get("train_max_samples", -1)
    rows = create_rl_dataset(
        place.file, config, place.tokenizer, None, is_train=True, max_samples=count
    )
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
    loader = StatefulDataLoader(
        dataset=rows, batch_size=2, num_workers=0, drop_last=True, collate_fn=collate_fn
    )
    (batch_dict,) = loader
    batch = DataProto.from_single_dict(batch_dict)
    assert batch.batch["input_ids"].shape == (2, 6) and batch.non_tensor_batch[
        "index"
    ].tolist() == [1, 2]
    assert batch_dict["extra_info"].dtype == object and batch_dict["extra_info"].shape == (2,)


@snippet
def padding_and_cutting(place: Place) -> None:
    from verl.utils import torch_functional as verl_F

    ids = torch.tensor([[1, 2, 3, 4]])
    options = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    cut = {
        side: verl_F.postprocess_data(input_ids=ids, max_length=3, truncation=side, **options)[
            0
        ].tolist()
        for side in ("left", "right", "middle")
    }
    assert cut == {"left": [[2, 3, 4]], "right": [[1, 2, 3]], "middle": [[1, 3, 4]]}
    longer, mask = verl_F.postprocess_data(
        input_ids=ids, max_length=6, left_pad=True, truncation="error", **options
    )
    assert (longer.tolist(), mask.tolist()) == ([[0, 0, 1, 2, 3, 4]], [[0, 0, 1, 1, 1, 1]])
    with pytest.raises(NotImplementedError, match="4 tokens"):
        verl_F.postprocess_data(input_ids=ids, max_length=3, truncation="error", **options)
    assert verl_F.pad_sequence_to_length(ids, 6, 9, left_pad=False).tolist() == [[1, 2, 3, 4, 9, 9]]
    assert verl_F.pad_sequence_to_length(ids, 6, 9, left_pad=True).tolist() == [[9, 9, 1, 2, 3, 4]]


@snippet
def masks_and_positions(place: Place) -> None:
    from verl.utils import torch_functional as verl_F
    from verl.utils.model import compute_position_id_with_mask

    assert compute_position_id_with_mask(torch.tensor([[0, 0, 1, 1, 1]])).tolist() == [
        [0, 0, 0, 1, 2]
    ]
    responses = torch.tensor([[5, 1, 0, 0], [5, 6, 7, 8]])
    assert verl_F.get_eos_mask(response_id=responses, eos_token=1).tolist() == [
        [1, 1, 0, 0],
        [1, 1, 1, 1],
    ]
    several = verl_F.get_response_mask(response_id=responses, eos_token=[1, 7], dtype=torch.bool)
    assert several.sum(-1).tolist() == [2, 3]
    assert float(verl_F.masked_mean(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([1, 1, 0]))) == 2.0
    zeros = torch.zeros(3)
    assert verl_F.clip_by_value(torch.tensor([-2.0, 0.5, 2.0]), zeros - 1, zeros + 1).tolist() == [
        -1.0,
        0.5,
        1.0,
    ]


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
    assert data[1:3].batch["x"].tolist() == [1, 2] and data.select_idxs([3]).batch[
        "x"
    ].tolist() == [3]
    data.check_consistency()
    data.non_tensor_batch["name"] = data.non_tensor_batch["name"][:3]
    with pytest.raises(AssertionError, match="expected 4 rows"):
        data.check_consistency()
    with pytest.raises(ProtocolError, match="expected 4 rows"):
        DataProto(batch=data.batch, non_tensor_batch={"short": np.array(["a"], dtype=object)})


@snippet
def prompts_leave_and_responses_come(place: Place) -> None:
    from verl import DataProto

    tensors = {"input_ids": torch.arange(2)[:, None], "attention_mask": torch.ones(2, 1)}
    batch = DataProto.from_dict(
        tensors=tensors, non_tensors={"uid": np.array(["a", "b"], dtype=object)}
    )
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
    assert all(
        hasattr(Dispatch, name)
        for name in ("ALL_TO_ALL", "DP_COMPUTE", "DP_COMPUTE_PROTO_WITH_FUNC")
    )


@snippet
def dispatch_by_its_functions(place: Place) -> None:
    from verl.single_controller.base.decorator import (
        collect_dp_compute_data_proto,
        dispatch_dp_compute_data_proto,
    )

    from quadriga.single_controller.dispatch import GroupLayout

    group, batch = GroupLayout(2), place.batch()
    (parts,), named = dispatch_dp_compute_data_proto(group, batch)
    assert [len(part) for part in parts] == [2, 2] and named == {}
    assert (
        collect_dp_compute_data_proto(group, parts).batch["values"].shape
        == batch.batch["values"].shape
    )


@snippet
def a_mode_of_ones_own(place: Place) -> None:
    from verl.single_controller.base.decorator import (
        Dispatch,
        register_dispatch_mode,
        update_dispatch_mode,
    )

    if "SHOWN_TO_ALL" not in Dispatch.members:
        register_dispatch_mode("SHOWN_TO_ALL")
    mode = Dispatch.SHOWN_TO_ALL
    update_dispatch_mode(
        mode, lambda group, one: ([[one] * group.world_size], {}), lambda group, outputs: outputs
    )
    assert mode.dispatch_fn is not None
    Dispatch.members.pop("SHOWN_TO_ALL")


@snippet
def roles_and_pools(place: Place) -> None:
    from verl.single_controller.ray import (
        RayClassWithInitArgs,
        RayResourcePool,
        create_colocated_worker_cls,
    )
    from verl.single_controller.ray.base import RayWorkerGroup
    from verl.trainer.ppo.ray_trainer import ResourcePoolManager, Role

    from quadriga.single_controller import Worker

    together = create_colocated_worker_cls({"actor": RayClassWithInitArgs(cls=Worker)})
    assert list(together.cls.roles) == ["actor"] and callable(RayWorkerGroup)
    pools = ResourcePoolManager(
        resource_pool_spec={"all": [2]}, mapping={Role.ActorRollout: "all", Role.Critic: "all"}
    )
    assert pools.get_n_gpus() == 2 and RayResourcePool([1, 1]).world_size == 2


@pytest.mark.usefixtures("verl_names")
@pytest.mark.parametrize("calls", SNIPPETS, ids=lambda one: one.__name__)
def test_it_runs(
    calls: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    calls(Place(tmp_path))


@pytest.mark.usefixtures("verl_names")
@pytest.mark.parametrize("name", INSTEAD)
def test_what_is_written_instead_is_told(name: str) -> None:
    module, _, attribute = name.rpartition(".")
    with pytest.raises(ImportError, match=INSTEAD[name]):
        exec(f"from {module} import {attribute}")


def test_their_number() -> None:
    print(
        f"\n{len(SNIPPETS)} groups of calls run as they stand; {len(INSTEAD)} need something else to be written"
    )
    assert len(INSTEAD) <= 14 <= len(SNIPPETS)
