# SPDX-License-Identifier: Apache-2.0
"""vLLM in this process: the caller's thread steps it, and weights are handed over as tensors."""

import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from quadriga.errors import RolloutError, first_line
from quadriga.rollout.base import Completion, Images, SamplingParams
from quadriga.rollout.vllm.core import VLLMBase, VLLMOptions
from quadriga.rollout.vllm.library import started
from quadriga.rollout.vllm.requests import Answer, to_prompt, to_vllm


class VLLMEngine(VLLMBase):
    """See `VLLMBase`; with `num_processes` above 1 vLLM adds as many processes, which hold the model."""

    # Engines whose model is in this process. They share vLLM's groups of processes, which end with the first engine
    # that is shut down or collected as garbage, and torch's own process group with them, whoever made it.
    _open: ClassVar[set[int]] = set()
    _parked: ClassVar[list[Any]] = []
    _has_group_of_others: ClassVar[bool] = False

    def __init__(self, options: VLLMOptions) -> None:
        self._aborted = threading.Event()
        if not (VLLMEngine._open or VLLMEngine._parked):
            VLLMEngine._has_group_of_others = dist.is_available() and dist.is_initialized()
        super().__init__(options)
        if self.takes_tensors:
            VLLMEngine._open.add(id(self))

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        images: Sequence[Images | None] | None = None,
    ) -> list[Completion]:
        """See `RolloutEngine.generate_batch`."""
        self._require_ready(prompts, sampling)
        given = [None] * len(prompts) if images is None else images
        self._require_sight(given)
        self._aborted.clear()
        answers: dict[str, Answer] = {}
        try:
            with torch.compiler.set_stance("force_eager" if self.options.is_eager else "default"):
                for prompt, params, seen in zip(prompts, sampling, given, strict=True):
                    own = to_vllm(self.library, params, self.options.eos_token_ids, streams=True)
                    request_id = self._new_id()
                    self.engine.add_request(request_id, to_prompt(prompt, seen), own, lora_request=self._lora_request)
                    answers[request_id] = Answer(None if seen is None else prompt)
                self._run(answers)
        except RolloutError:
            self._give_up(answers)
            raise
        except Exception as error:  # vLLM's failures have no class in common
            self._give_up(answers)
            raise self._died(f"failed: {first_line(error)}") from error
        return [
            answer.completion(params, self.options.log_probs_of, self.weight_version)
            for answer, params in zip(answers.values(), sampling, strict=True)
        ]

    def abort(self) -> None:
        """See `RolloutEngine.abort`; from another thread than the one that generates."""
        self._aborted.set()

    def close(self) -> None:
        """See `RolloutEngine.close`. An engine in this process is kept until the last of them is closed."""
        if self._state == "closed":
            return
        super().close()
        if not self.takes_tensors:
            self.engine.engine_core.shutdown()
            return
        VLLMEngine._open.discard(id(self))
        VLLMEngine._parked.append(self.engine)
        if not (VLLMEngine._open or VLLMEngine._has_group_of_others):
            for engine in VLLMEngine._parked:
                engine.engine_core.shutdown()
            VLLMEngine._parked.clear()

    @property
    def takes_tensors(self) -> bool:
        """See `VLLMBase.takes_tensors`."""
        return self.options.num_processes == 1

    def _start(self) -> None:
        with started(is_beside=self.options.num_processes > 1), torch.compiler.set_stance("force_eager"):
            self.engine: Any = self.library.engine(self.options.in_vllms_words())

    def _ask(self, method: str, *args: Any, **options: Any) -> Any:
        owner = self.engine if hasattr(self.engine, method) else self.engine.engine_core
        return getattr(owner, method)(*args, **options)

    def _run(self, answers: dict[str, Answer]) -> None:
        while self.engine.has_unfinished_requests():
            if self._aborted.is_set():
                self._give_up(answers)
                return
            for output in self.engine.step():
                answers[output.request_id].add(output)

    def _give_up(self, answers: dict[str, Answer]) -> None:
        self.engine.abort_request([request_id for request_id, answer in answers.items() if answer.reason is None])
