"""The engine of training jobs (`EngineConfig(mode="training")`): it attaches graphs to models and iterations."""
