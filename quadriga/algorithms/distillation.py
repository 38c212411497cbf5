# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation: divergence of the student from a teacher, on the student's responses.

    reverse KL    E_student[log p - log q], estimated from the sampled token alone
                  (`kl.kl_penalty`). As a reward it changes the log-prob of the sampled token; as a
                  loss the estimate itself is differentiated.
    forward KL    sum of q (log q - log p) over the teacher's k likeliest tokens. Tokens that the
                  student never samples count, too.

p is the student's probability and q the teacher's, both at the sampling temperature. Agarwal et
al., "On-Policy Distillation of Language Models", arXiv:2306.13649; the reverse KL as a reward: Lu,
"On-Policy Distillation" (2025), thinkingmachines.ai/blog/on-policy-distillation.

Shapes: B sequences, T response positions, k likeliest tokens.
"""

from torch import Tensor


def forward_kl(
    log_probs: Tensor, teacher_log_probs: Tensor, *, floor: float | None = None
) -> Tensor:
    """Forward KL divergence on the teacher's likeliest tokens.

    Args:
        log_probs: log-probabilities of the student, [B, T, k].
        teacher_log_probs: log-probabilities of the teacher for the same tokens, [B, T, k].
        floor: lower bound for both log-probabilities, in nats; None sets no bound.

    Returns:
        The divergence at each position in nats, [B, T], clamped to at least 0. The sum over k
        tokens may be negative where the student gives these tokens more probability than the
        teacher does. The clamp makes the divergence and its gradient 0 there.
    """
    # A floor keeps tokens that are almost impossible for the student from dominating the sum.
    if floor is not None:
        log_probs = log_probs.clamp(min=floor)
        teacher_log_probs = teacher_log_probs.clamp(min=floor)
    teacher_probs = teacher_log_probs.exp()
    divergence = (teacher_probs * (teacher_log_probs - log_probs)).sum(-1)
    return divergence.clamp(min=0)
