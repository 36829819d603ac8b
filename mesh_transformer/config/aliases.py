"""What other programs call our fields: a name to group.field. They are suggested, never taken."""

from __future__ import annotations

_NAMES = {
    "model.layers": "n_layer n_layers num_layers num_hidden_layers transformer_layers depth",
    "model.d_model": "n_embd hidden_size embed_dim d_embed dim width hidden_dim",
    "model.n_heads": "n_head num_heads num_attention_heads heads",
    "model.d_head": "head_dim head_size d_kv",
    "model.d_ff": "n_inner intermediate_size ffn_dim mlp_dim",
    "model.n_vocab": "vocab vocab_size n_tokens",
    "model.seq": "context context_length context_size ctx n_ctx n_positions max_position_embeddings "
    "block_size seq_len seq_length sequence_length max_seq_len max_seq_length max_length",
    "model.pe": "position_encoding positional_encoding position_embedding",
    "model.pe_rotary_dims": "rotary_dim rotary_dims rotary_ndims",
    "model.norm": "norm_type normalization",
    "compute.dtype": "dtype precision torch_dtype",
    "compute.remat": "gradient_checkpointing activation_checkpointing checkpoint_activations",
    "mesh.tp": "mp model_parallel tensor_parallel tp_size mp_size",
    "mesh.dp": "data_parallel dp_size",
    "optimizer.name": "optim optimizer_name optimizer_type optim_type",
    "optimizer.lr": "learning_rate max_lr peak_lr lr_max",
    "optimizer.end_lr": "min_lr final_lr lr_min",
    "optimizer.warmup_steps": "warmup warmup_iters num_warmup_steps",
    "optimizer.anneal_steps": "decay_steps lr_decay_steps lr_decay_iters",
    "optimizer.total_steps": "steps max_steps num_steps n_steps train_steps num_train_steps iterations "
    "iters max_iters train_iters epochs n_epochs num_epochs num_train_epochs",
    "optimizer.weight_decay": "wd decay",
    "optimizer.gradient_accumulation_steps": "grad_accum gradient_accumulation accumulation_steps gas",
    "optimizer.clip_norm": "grad_clip clip gradient_clipping max_grad_norm clip_grad",
    "optimizer.b1": "beta1 adam_beta1 adam_b1",
    "optimizer.b2": "beta2 adam_beta2 adam_b2",
    "optimizer.eps": "epsilon adam_epsilon adam_eps",
    "data.batch_size": "batch bs train_batch_size global_batch_size micro_batch_size",
    "data.per_replica_batch": "per_device_batch_size per_device_train_batch_size",
    "data.train_set": "dataset train_data train_file train_path data_path train_dataset",
    "data.val_set": "val_data val_file valid_set validation_set eval_set eval_data val_dataset",
    "data.val_batches": "eval_batches eval_iters val_steps",
    "data.val_every": "eval_every eval_steps eval_interval val_interval",
    "checkpoint.model_dir": "output_dir out_dir save_dir checkpoint_dir ckpt_dir run_dir",
    "checkpoint.ckpt_every": "save_every save_steps save_interval checkpoint_every",
    "checkpoint.keep_latest": "keep_n keep_last save_total_limit",
    "logging.name": "run_name experiment_name",
    "logging.wandb_project": "project project_name",
}
ALIASES = {alias: name for name, aliases in _NAMES.items() for alias in aliases.split()}
