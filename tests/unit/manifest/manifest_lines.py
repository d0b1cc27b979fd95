"""Words behind ``hvkit manifest`` that give every option of a system."""

RUN = "-np 8 --slots 4 --env RATE=1e-3"
COMMAND = "train.py --epochs 2"
IN_CLUSTER = (
    f"--image hvkit:1 --name digits --namespace ml {RUN} --gpus 1 --cpus 500m "
    "--memory 1.5Gi --shm-size 512M --volume d:/data --volume o.a:/out --volume d:/more "
    "--launcher-cpus 2 --launcher-memory 2Gi --retries 2 --grace 60 --prefix --timestamps "
    "--lost-after 7.5 --log-dir /out/logs --show 0,4-7 --pull-secret registry "
    "--node-label example.com/gpu=a100 --tolerate nvidia.com/gpu "
    "--tolerate pool=train:NoSchedule --queue training --secret-env TOKEN=tracker:api-token"
)
MPIJOB = f"mpijob {IN_CLUSTER}"
TRAINJOB = f"trainjob {IN_CLUSTER}"
SAGEMAKER = (
    f"sagemaker --image hvkit:1 --name digits {RUN} --instance-type ml.p4d.24xlarge "
    "--role arn:aws:iam::123456789012:role/train --output s3://bucket/out --disk 50 "
    "--input data=s3://bucket/mnist --time 1-02:00:00 --prefix "
    "--spot 2-00:00:00 --checkpoints s3://b/c --subnet subnet-1 --subnet subnet-2 "
    "--security-group sg-1 --output-key alias/results --disk-key 1234-ab"
)
AZUREML = (
    f"azureml --image hvkit:1 --name digits {RUN} --compute gpus --code src "
    "--experiment e --shm-size 4Gi --time 02:00:00 --input data=azureml://datastores/d/paths/m "
    "--output model=azureml://datastores/d/paths/o "
    "--identity 01234567-89ab-cdef-0123-456789abcdef"
)
