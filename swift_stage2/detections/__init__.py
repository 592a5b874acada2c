"""Predicted boxes beside true ones, and every metric of them; for `evaluate` and for evaluations during training.

prediction  one row's answer, as a line of a file of predictions
prediction_files  the rows with their truth, and a file of predictions beside them
objects     all boxes of one side as arrays
scores      who is matched with whom; every metric of one set, and its intervals; COCO's and TIDE's are hotcoco's
recorded    what an evaluation during training leaves in RUN_DIR/evaluations, written and read
"""
