# SPDX-License-Identifier: Apache-2.0
"""An engine whose gradients tests look at."""

from quadriga.engines.fsdp.engine import FSDPEngine, OptimizerStep


class Recording(FSDPEngine):
    """An engine that keeps its gradients instead of stepping."""

    def optimizer_step(self, lr: float) -> OptimizerStep:
        self.parameters.attach_gradients()
        self.recorded = {
            name: self.parameters.masters[name].grad.clone() for name in self.parameters.trained
        }
        self.parameters.clear_gradients()
        return OptimizerStep(0.0, is_applied=True)
