"""What a checkpoint holds, and how a run resumes from one."""
