"""A seeded bug, and the tests that notice the bugs of one family."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """What is wrong, where, the text before and after, and the tests that should notice."""

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


# What to run for a family of mutants: fast tests first, since the first failure ends a run.
LATTE = ("tests/ops/test_latte.py", "tests/ops/test_forms.py", "-k", "latte")
DECAY = ("tests/ops/test_decay.py", "tests/ops/test_forms.py", "-k", "decay or document_attention")
WINDOW = ("tests/ops/test_window.py", "tests/ops/test_forms.py", "-k", "window or sinks or ring or softcap or queries")
KEPT = ("tests/ops/test_kept.py",)
KEPT_FORMS = ("tests/ops/test_kept.py", "tests/ops/test_forms.py", "-k", "kept or slot or best or events or cuts")
REMEMBERED = tuple(f"tests/extend/test_{name}.py" for name in ("attention_rate", "lifetimes", "questions", "remember"))
STATE_SIZE = ("tests/contract", "-k", "state_size and local-attention")
SOFTMAX = ("tests/ops/test_window.py", "tests/ops/test_forms.py", "-k", "full_attention or softmax_attention")
SCAN = ("tests/ops/test_scan.py", "tests/ops/test_forms.py", "-k", "scan or conv")
MIXERS = ("tests/mixers/test_oracles.py",)
BOTH_WAYS = ("tests/contract", "-k", "bidirectional and packing")
PADDING = ("tests/contract", "-k", "(padding or pads_say_nothing) and (latte or softmax)")
STATE = ("tests/test_state.py",)
TOKENS = ("tests/test_tokens.py", "-k", "not registered")
PIECES = ("tests/models/test_blocks.py", "-k", "pieces")
BLOCK = ("tests/models/test_blocks.py", "tests/mixers/test_rwkv4.py", "-k", "sublayers or cached")
UNCHANGED = ("tests/contract", "-k", "nothing_returned_is_changed")
MARKS = ("tests/contract", "-k", "marks and (rglru or mamba or rwkv or s5)")
DECAYED = ("tests/train/test_run.py", "-k", "marks_decide or weight_decay")
SELECTIVE = ("tests/ops/test_selective.py", "tests/ops/test_forms.py", "-k", "selective")
WKV = ("tests/ops/test_wkv.py", "tests/ops/test_forms.py", "-k", "wkv")
CONV_KERNEL = ("tests/ops/native/test_conv.py",)
PRODUCT = ("tests/ops/test_product.py",)
COMPLEX = ("tests/ops/test_complex_scan.py", "tests/ops/test_forms.py", "-k", "complex_scan")
DELTA = ("tests/ops/test_forms.py", "-k", "delta or bonus")
LOG_LINEAR = ("tests/ops/test_log_linear.py", "tests/ops/test_forms.py", "-k", "log_linear")
CARRIED = ("tests/mixers/test_rwkv7.py", "-k", "pieces or values")
REGISTRY = ("tests/test_tokens.py", "tests/ops", "--ignore=tests/ops/native")
STEP = ("tests/models/test_step.py", "tests/models/test_written_states.py", "tests/decode")
SERVED = ("tests/decode", "-k", "log-linear or s5 or fem or zeros or last_block")
LOG_SUM = ("tests/ops/test_log_sum.py", "tests/ops/test_forms.py", "-k", "log_sum")
KALMAN = ("tests/mixers/test_state_spaces.py", "tests/ops/test_forms.py", "-k", "kalman")
CASCADE = ("tests/mixers/test_hla.py",)
CHUNKED = ("tests/mixers/test_mega.py",)
STATE_SPACE = ("tests/ops/test_state_space.py", "tests/ops/test_forms.py", "-k", "state_space")
LAPLACE = ("tests/ops/test_forms.py", "-k", "laplace")
LINEAR = ("tests/mixers/test_lightning.py", "tests/mixers/test_features.py")
SPARSE = ("tests/mixers/test_sla.py",)
CONTINUATIONS = ("tests/eval/test_continuations.py",)
PROCESSES = ("tests/workflows/test_processes.py",)
STAGES = ("tests/decode/test_stages.py",)
#: Tests of kernels and of what stands around them; all others are run without them, or a kernel would hide the bug.
WITH_KERNELS = (STEP, SERVED, CONV_KERNEL, PRODUCT, STAGES)
