"""What recipes and scripts share: data, models, launch topology, checks and the record of a run."""
