"""Hooks of transformers that no run of this Trainer calls: an override of one is refused, not ignored."""

from __future__ import annotations

_LOOP = "override training_step or get_batch_samples, or give a callback with the events of that moment"
_STATE = "give a callback state_dict() and load_state_dict(), which every checkpoint saves and restores"
# Hooks of transformers that no run of this Trainer has -> what to override in their place.
REFUSED: dict[str, str] = {
    "_build_accelerator_args": "pass strategy= to the Trainer",
    "_defer_fsdp_gradient_reduction": "pass strategy= to the Trainer",
    "_finalize_training": "give a callback with on_train_end",
    "_finish_current_push": "give a callback with on_push_begin",
    "_get_grad_norm": "override _clip_grad_norm",
    "_get_learning_rate": "override log",
    "_has_mixed_mesh_grads": "override _clip_grad_norm",
    "_hp_search_setup": "pass hp_space or model_init to hyperparameter_search",
    "_init_training_state": _LOOP,
    "_inner_training_loop": _LOOP,
    "_issue_warnings_after_load": "override _load_from_checkpoint: elsewhere names that do not fit are an error",
    "_load_callback_state": _STATE,
    "_load_scaler": _STATE,
    "_mixed_mesh_grad_norm": "override _clip_grad_norm",
    "_nested_gather": "override evaluation_loop",
    "_prepare_for_training": "give a callback with on_train_begin",
    "_report_to_hp_search": "pass compute_objective to hyperparameter_search",
    "_run_epoch": _LOOP,
    "_sync_replicated_trainable_parameters": "pass strategy= to the Trainer",
    "_track_num_input_tokens": "set include_num_input_tokens_seen, or override log",
    "_tune_save_checkpoint": "override _save_checkpoint",
    "_update_auto_batch_size": "set auto_find_batch_size=False",
    "_validate_args": "check the arguments in __init__",
    "_wrap_model": "pass strategy= to the Trainer, whose prepare wraps the model; for a copy of evaluation_loop "
    "call super().evaluation_loop, or override prediction_step",
    "get_cp_size": "pass strategy= to the Trainer",
    "get_sp_size": "pass strategy= to the Trainer",
    "get_tp_size": "pass strategy= to the Trainer",
    "set_initial_training_values": "set max_steps or num_train_epochs",
    "store_flos": "override floating_point_ops",
}
# Attributes of transformers' Trainer that this one does not set -> what to do. A subclass may have its own of a name.
NOT_SET: dict[str, str] = {
    "_eval_dataloaders": "assign it before you read it, as overrides of get_eval_dataloader do",
    "_loss_shifts_labels": "override _get_num_items_in_batch, which counts the targets",
    "compute_objective": "pass it to hyperparameter_search",
    "objective": "hyperparameter_search returns that of the best run",
}


def refuse_unknown_hooks(user_class: type, own_class: type) -> None:
    """Raise if a subclass overrides a hook of transformers that no run of this Trainer calls."""
    for cls in user_class.__mro__[: user_class.__mro__.index(own_class)]:
        for name in vars(cls).keys() & REFUSED.keys():
            raise TypeError(
                f"{cls.__name__}.{name} overrides a method of transformers' Trainer that this one does not call: "
                f"{REFUSED[name]}"
            )
