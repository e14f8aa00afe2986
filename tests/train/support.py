"""What several tests of training runs use."""

from pathlib import Path

from transformers import TrainerCallback

from latte.loading.layout import read_metrics


def weights(out):
    return (Path(out) / "model" / "model.safetensors").read_bytes()


def timeless(out):
    """Metrics without what depends on the clock."""
    return [{k: v for k, v in line.items() if "second" not in k} for line in read_metrics(Path(out))]


class StopAt(TrainerCallback):
    """Raises or signals at the end of a step, as something outside would."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action()


def kill():
    raise RuntimeError("pulled the plug")
