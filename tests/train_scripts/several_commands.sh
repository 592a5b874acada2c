MAX_PIXELS=401408 FPS=2 swift export --model Qwen/Qwen2.5-VL-3B-Instruct --dataset my-team/harbour --to_cached_dataset true

PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' MAX_PIXELS=501760 VIDEO_MAX_PIXELS=50176 FPS_MAX_FRAMES=12 \
NPROC_PER_NODE=3 NNODES=2 CUDA_VISIBLE_DEVICES=0,1,2 \
swift sft --model Qwen/Qwen2.5-VL-3B-Instruct --tuner_type full --cached_dataset ./cached/train \
    --dataset my-team/harbour --gradient_accumulation_steps 2 --deepspeed zero3 && echo done

# See what it has learnt.
swift infer --model output/checkpoint-100 --stream true
