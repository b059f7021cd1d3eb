"""What a trained model has learnt, shown or measured."""
