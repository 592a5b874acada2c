export MASTER_PORT=29501
GPUS=2
OMP_NUM_THREADS=4 torchrun --nproc_per_node=$GPUS --master_port $MASTER_PORT -m swift.cli.sft \
    --model=Qwen/Qwen3-VL-4B-Instruct --tuner_type=lora --dataset=my-team/harbour --model_kwargs '{"fps_max_frames": 8}' \
    --max_steps 100 --seed -1 --max_steps 200 --model_revision 4.10 --logging_steps 5 2>&1 | tee train.log
