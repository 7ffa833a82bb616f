"""What the tasks that predict for places in images share: the model and its weights."""
