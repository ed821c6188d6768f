"""What train.py and eval.py share, and model/ must not know: settings, the run folder, devices, processes, wandb."""
