"""Reading what is on disk or on the hub: folders of runs, models with their tokenizers, pretrained models to extend."""
