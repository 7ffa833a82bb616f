"""What the tasks that predict for every place of an image share: model, weights, pictures."""
