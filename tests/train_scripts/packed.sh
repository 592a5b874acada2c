NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 MAX_PIXELS=$((1280 * 28*28)) swift sft \
    --model Qwen/Qwen2.5-VL-7B-Instruct --tuner_type full --torch_dtype bfloat16 \
    --dataset my-team/harbour#20000 my-team/streets --split_dataset_ratio 0.01 \
    --packing true --padding_free true --use_liger_kernel true --attn_impl flash_attn \
    --freeze_vit false --freeze_aligner false --vit_lr 1e-5 \
    --gradient_accumulation_steps 1 --deepspeed zero2 --output_dir output --add_version true
