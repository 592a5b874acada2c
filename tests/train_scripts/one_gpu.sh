# The limit is a width of 1280 and a height of 784.
CUDA_VISIBLE_DEVICES=0 \
MAX_PIXELS=1003520 \
swift sft \
    --model Qwen/Qwen2-VL-2B-Instruct \
    --train_type lora \
    --dataset 'my-team/harbour:grounding#1000' \
    --learning_rate 2e-4 \
    --lora_rank 16 \
    --gradient_accumulation_steps 16 \
    --eval_steps 50
