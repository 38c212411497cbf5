# SPDX-License-Identifier: Apache-2.0
"""`distillation`: teachers, and how the student learns from their probabilities of its responses."""

from typing import Annotated, Any, Literal

from pydantic import NegativeFloat, PositiveFloat, model_validator

from quadriga.config.actor import FSDPConfig, ParallelConfig
from quadriga.config.base import Findings, ReadIf, fill_missing, notice_unused
from quadriga.config.types import Count, KLKind, PathText
from quadriga.errors import ConfigError

_TOP_K = "forward_kl_topk"


class DistillationConfig(ParallelConfig):
    """On-policy distillation: a student learns from a teacher's probabilities of its own responses."""

    enable: bool = False
    """Whether the student learns from a teacher's probabilities of the tokens of each response."""
    path: PathText | None = None
    """The teacher: a folder, a hub name, or addresses of servers with vLLM's API (`http://host:8000`), with commas."""
    teachers: dict[str, PathText] = {}
    """Open dictionary: data source -> its teacher, where it is not `path`."""
    loss_mode: KLKind | Literal["forward_kl_topk"] = "k1"
    """Reverse KL by one of these estimators of the drawn token; or forward KL on the teacher's `topk` tokens."""
    topk: Annotated[Count, ReadIf("loss_mode", (_TOP_K,))] = 32
    """Number of the teacher's most likely tokens at each position."""
    use_policy_gradient: bool = True
    """Whether a token's divergence is subtracted from its advantage, without discount; else it is a loss. The default
    is false for `forward_kl_topk`, which can only be a loss."""
    use_task_rewards: bool = True
    """Whether the policy also learns from rewards; false: it only learns from the teacher, and rewards are reported."""
    loss_coef: PositiveFloat = 1.0
    """Weight of the divergence, per nat."""
    loss_max_clamp: PositiveFloat | None = None
    """Upper bound of the absolute divergence of a token, in nats. null: none."""
    log_prob_min_clamp: Annotated[NegativeFloat | None, ReadIf("loss_mode", (_TOP_K,))] = None
    """Lower bound to which log-probabilities of student and teacher are clamped, in nats. null: none."""
    log_prob_max_token_len_per_gpu: Count = 16384
    """Tokens in one pass of a teacher."""
    engine_kwargs: dict[str, Any] = {}
    """Open dictionary: of teachers that are servers, `model` (the name they serve), `headers`, `timeout_s`, `num_tries`
    and `max_num_seqs` (requests in flight)."""
    fsdp_config: FSDPConfig = FSDPConfig()

    @model_validator(mode="before")
    @classmethod
    def _default_for_top_k(cls, values: Any) -> Any:
        """Set `use_policy_gradient` to False by default for losses on the teacher's top tokens."""
        if not isinstance(values, dict) or values.get("loss_mode") != _TOP_K:
            return values
        return fill_missing(values, {"use_policy_gradient": False})

    @property
    def num_top_tokens(self) -> int | None:
        """Number of most likely tokens for which a teacher returns probabilities, at each position.

        None: it returns those of the response's tokens alone.
        """
        return self.topk if self.loss_mode == _TOP_K else None

    def teacher_of(self, data_source: str) -> str | None:
        """Teacher of a data source, or None."""
        return self.teachers.get(data_source, self.path)

    @property
    def named_teachers(self) -> dict[str, str]:
        """Folder, hub name or addresses of each teacher, by the dotted key that names it.

        {} if distillation is not enabled.
        """
        if not self.enable:
            return {}
        teachers = {} if self.path is None else {"distillation.path": self.path}
        return teachers | {
            f"distillation.teachers.{source}": path for source, path in self.teachers.items()
        }

    @property
    def loaded_teachers(self) -> dict[str, str]:
        """Teachers that the run loads (servers are not), by the dotted key that names them."""
        return {key: path for key, path in self.named_teachers.items() if not is_served(path)}

    @property
    def all_teachers(self) -> list[str]:
        """Distinct teachers, in the order of their keys."""
        return list(dict.fromkeys(self.named_teachers.values()))

    def findings(self, at: str) -> Findings:
        if not self.enable:
            yield from notice_unused(self.changed_keys(at), f"{at}.enable is false")
            return
        if not self.all_teachers:
            yield ConfigError(
                f"{at}.path",
                f"null, with {at}.enable=True",
                "a teacher",
                "Set it to a folder or a hub name, or set teachers for several data sources.",
            )
        if self.loss_mode == _TOP_K and self.use_policy_gradient:
            yield ConfigError(
                f"{at}.use_policy_gradient",
                f"true, with loss_mode={_TOP_K}",
                "false",
                "Set it to false: a policy gradient only changes sampled tokens.",
            )
        # The loss k1 is student log-prob minus teacher log-prob. The teacher's is a constant, so
        # the gradient is that of the student's alone.
        if self.loss_mode in ("kl", "k1") and not self.use_policy_gradient:
            yield ConfigError(
                f"{at}.loss_mode",
                f"{self.loss_mode}, with use_policy_gradient=False",
                f"k2, k3, one with a +, or {_TOP_K}",
                "The gradient of k1 does not depend on the teacher.",
            )
        if self.engine_kwargs and not any(map(is_served, self.all_teachers)):
            yield from notice_unused([f"{at}.engine_kwargs"], "no teacher is a server")


def is_served(teacher: str) -> bool:
    """Whether a teacher is a server: it is then named by addresses, not by a folder or hub name."""
    return "://" in teacher
