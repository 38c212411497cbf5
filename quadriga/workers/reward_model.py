# SPDX-License-Identifier: Apache-2.0
"""The reward model: one score for each response, by a classifier that was trained to tell good from bad."""

import torch
from transformers import PreTrainedTokenizerBase

from quadriga.config import Config
from quadriga.config.layout import Layout, Sizes
from quadriga.engines import process_group
from quadriga.engines.fsdp.engine import FSDPEngine, Memory
from quadriga.engines.micro_batches import MicroBatching
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.step import infer
from quadriga.errors import ConfigError, RewardError
from quadriga.models.reward_scorer import RewardScorer, load_reward_model
from quadriga.observe.machine import release_free_memory
from quadriga.observe.metrics import Metric
from quadriga.protocol import DataProto
from quadriga.single_controller import Dispatch, Execute, Worker, register
from quadriga.workers.reward_inputs import choose_inputs, sequences_batch
from quadriga.workers.roles import BY_REPLICA, MESH, choose_device, compute_dtype


class RewardModelWorker(Worker):
    """See the module.

    Args:
        config: of the run.
        tokenizer: of the policy, whose responses are scored.
    """

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self.config, self.tokenizer = config, tokenizer
        self.reward_config = config.reward_model

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def init_model(self) -> dict[str, str]:
        """Load the model and its tokenizer. Returns what was chosen, with reasons, for people to read."""
        device = choose_device(self.config.trainer.device, self.local_rank)
        world = process_group.join(self.place, device)
        sizes = Sizes.of(self.reward_config.model.fsdp_config.fsdp_size, self.reward_config)
        self.processes = Processes.arrange(world, Layout.of(world.size, sizes, "reward_model.model"))
        self.register_mesh(MESH, self.processes.place.dp_rank, self.processes.place.is_collected)
        dtype = compute_dtype(self.reward_config.model.fsdp_config, device)
        section = self.reward_config.model
        # Every process loads the whole model, and keeps its share.
        model = load_reward_model(
            str(section.path), dtype=dtype.value, device=device, trust_remote_code=section.trust_remote_code
        )
        vocabulary_size = model.get_input_embeddings().num_embeddings
        self.engine = self._make_engine(RewardScorer(model), dtype.value, device)
        self.inputs, tokenizer_limit, reason = choose_inputs(self.config, self.tokenizer, vocabulary_size)
        self.limit = self._choose_limit(model.config.get_text_config(), tokenizer_limit)
        about = self.engine.describe()
        longest = "" if self.limit is None else f", up to {self.limit} tokens"
        return {
            "reward model": f"{about['parameters'] / 1e6:.1f} M parameters, {about['weights']} ({dtype.reason})",
            "reward inputs": f"{reason}{longest}",
        }

    def _make_engine(self, scorer: RewardScorer, dtype: torch.dtype, device: torch.device) -> FSDPEngine:
        fsdp = self.reward_config.model.fsdp_config
        return FSDPEngine(
            scorer,
            dtype=dtype,
            device=device,
            memory=Memory(reshard_after_forward=fsdp.reshard_after_forward, offload_weights=fsdp.offload_policy),
            name="reward model",
            processes=self.processes,
        )

    def _choose_limit(self, model_config, tokenizer_limit: int | None) -> int | None:
        """The longest input in tokens; None: nothing bounds it."""
        positions = getattr(model_config, "max_position_embeddings", None)
        given = self.reward_config.max_length
        if given is not None and positions is not None and given > positions:
            raise ConfigError(
                "reward_model.max_length",
                got=str(given),
                expected=f"at most {positions}, the positions of the reward model",
                fix="Lower it, or leave it out.",
            )
        return given or min((limit for limit in (positions, tokenizer_limit) if limit), default=None)

    @register(dispatch_mode=Dispatch.RANK_ZERO, execute_mode=Execute.RANK_ZERO)
    def reads_chats(self) -> bool:
        """Whether `compute_rm_score` reads `raw_prompt` and `uid` beside the tokens."""
        return self.inputs.reads_chats

    @register(dispatch_mode=BY_REPLICA)
    def compute_rm_score(self, data: DataProto) -> DataProto:
        """`rm_scores` [B, T]: the score at the last valid token of each response, zero elsewhere.

        Metrics: `reward/rm_cut`, the sequences whose beginning was cut off because they were too long.

        Raises:
            EngineError: a row without a prompt or without a response.
            RewardError: a score that is not finite.
        """
        rows = self.inputs.sequences(data)
        num_cut = 0
        if self.limit is not None:
            num_cut = sum(row.length > self.limit for row in rows)
            rows = [row.cut(self.limit) if row.length > self.limit else row for row in rows]
        scores = infer(self.engine, sequences_batch(rows), self._pieces())["scores"].sum(-1)
        release_free_memory()
        self._require_finite(scores)
        num_columns = data.batch["response_mask"].shape[1]
        lengths = data.batch["attention_mask"][:, -num_columns:].sum(-1)
        rm_scores = torch.zeros(len(data), num_columns, dtype=torch.float32)
        rm_scores[torch.arange(len(data)), lengths - 1] = scores
        metrics = {"reward/rm_cut": Metric(num_cut, "sum")}
        return DataProto.from_dict(tensors={"rm_scores": rm_scores}, meta_info={"metrics": metrics})

    def _pieces(self) -> MicroBatching:
        config = self.reward_config
        return MicroBatching(
            None if config.use_dynamic_bsz else config.micro_batch_size_per_gpu,
            config.forward_max_token_len_per_gpu,
            self.config.actor_rollout_ref.actor.use_prefix_sharing,
        )

    def _require_finite(self, scores: torch.Tensor) -> None:
        broken = (~torch.isfinite(scores)).nonzero()[:, 0].tolist()
        if broken:
            raise RewardError(
                "reward model",
                got=f"{len(broken)} of {len(scores)} scores that are not finite, first {scores[broken[0]]:g} for row "
                f"{broken[0]}",
                expected="finite scores",
                fix="Set reward_model.model.fsdp_config.model_dtype=float32, or check the model's weights.",
            )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def close(self) -> None:
        """Leave the other processes of the role."""
        process_group.leave(self.processes.world)
