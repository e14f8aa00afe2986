"""Reading what is on disk or on the hub: folders of runs, models with their tokenizers, pretrained models to extend."""

from latte.loading.models import load, load_folder, load_model, model_weights
from latte.loading.pretrained import Original, load_any, load_original

__all__ = ["Original", "load", "load_any", "load_folder", "load_model", "load_original", "model_weights"]
