"""`swift import-config`: configurations of Axolotl, TRL and ms-swift as ours, one table of names per project."""
