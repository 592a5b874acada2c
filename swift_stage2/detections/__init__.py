"""Predicted boxes beside true ones, and every metric of them; for `evaluate` and for evaluations during training.

prediction  rows with their truth, and the predictions beside them: files of both
scores      who is matched with whom; every metric of one set, and its intervals; COCO's and TIDE's are hotcoco's
recorded    what an evaluation during training leaves in RUN_DIR/evaluations, written and read
"""
