"""The files in which a training saves its model, and their pushes to the Hub."""
