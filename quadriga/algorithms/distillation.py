# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation: how far the student is from a teacher, token by token, on responses of the student's own.

    reverse KL    E_student[log p - log q], estimated from the drawn token alone (`kl.kl_penalty`); as a reward it moves
                  the log-prob of the drawn token, as a loss the estimate itself is differentiated
    forward KL    sum of q (log q - log p) over the teacher's k likeliest tokens; a token that the student never draws
                  counts, too

p is the student's probability, q the teacher's, both at the sampling temperature. Agarwal et al., "On-Policy
Distillation of Language Models", arXiv:2306.13649; the reverse KL as a reward: Lu, "On-Policy Distillation" (2025),
thinkingmachines.ai/blog/on-policy-distillation.

Shapes: B sequences, T response positions, k likeliest tokens.
"""

from torch import Tensor


def forward_kl(
    log_probs: Tensor, teacher_log_probs: Tensor, *, floor: float | None = None
) -> Tensor:
    """The divergence on the teacher's likeliest tokens, [B, T] in nats, at least 0: where the student gives these
    tokens more than the teacher does, their sum may be below, and nothing is learned from the place.
    `log_probs`, `teacher_log_probs`: [B, T, k] of student and teacher.
    `floor`: lower log-probabilities of both count as this one; None: they count as they are."""
    if floor is not None:
        log_probs, teacher_log_probs = (
            log_probs.clamp(min=floor),
            teacher_log_probs.clamp(min=floor),
        )
    return (teacher_log_probs.exp() * (teacher_log_probs - log_probs)).sum(-1).clamp(min=0)
