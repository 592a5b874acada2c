#!/bin/bash
set -euo pipefail
ROOT=/data/models; export OUTPUT="$ROOT/out put"   # don't forget the blank
MODEL=${MODEL:-"Qwen/Qwen2.5-VL-3B-Instruct"} ; EMPTY=''
export CUDA_VISIBLE_DEVICES=2,3 NPROC_PER_NODE=2 WANDB_NAME=$(date +%F)
HIDDEN=3
COMMON="--max_length 4096 --num_train_epochs 2
    --torch_dtype bfloat16"
if [ -n "$EMPTY" ]; then
    REPORT=wandb
fi
cat > config.json <<< '{}'
mkdir -p . && cd . || exit 1
nohup swift sft --model "$MODEL" --output_dir "${OUTPUT}/run" $COMMON $EMPTY \
    --dataset "${DATA:-my-team/harbour}"'#500' my-team/streets#20 --run_name a\ b"\$c"$EMPTY'' --response_prefix "$EMPTY" \
    --system 'You are: "careful" # and $literal' --target_regex "^(q|v)_proj$" \
    --weight_decay=-0.5 --tuner-type lora --use_hf > train.log 2>&1 &
MODEL=other
echo "started"; wait
