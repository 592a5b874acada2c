env CUDA_VISIBLE_DEVICES=4,5,6,7 python swift/cli/sft.py --model Qwen/Qwen2.5-VL-72B-Instruct --streaming true \
    --dataset my-team/harbour --task_type seq_cls --tuner_type lora --truncation_strategy right --gradient_accumulation_steps 16
