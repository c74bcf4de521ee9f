#!/bin/busybox sh
# The first program of a machine of `cargo xtask vm`: it makes what every system has, runs the steps of /steps, one line each,
# and powers off. Its second serial line is for what the host reads: lines that begin with @@ tell how far it is.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/busybox
export HOME=/root
/bin/busybox mkdir -p /busybox /proc /sys /dev /tmp /run/netns /var/run /root /etc
/bin/busybox --install -s /busybox
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
exec </dev/null >/dev/ttyS1 2>&1
stty raw -echo </dev/ttyS1
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /run
mount -t bpf bpf /sys/fs/bpf
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
ln -sf /proc/self/fd /dev/fd
ip link set lo up
echo /sbin/modprobe >/proc/sys/kernel/modprobe
ulimit -n 65536
for module in $(cat /modules); do
    /sbin/modprobe "$module" || echo "@@ lacks $module"
done
echo "@@ up $(uname -r)"
while IFS=' ' read -r name command <&3; do
    echo "@@ begin $name"
    # Not busybox's: that would run its own ip.
    /bin/sh -c "$command"
    echo "@@ end $name $?"
done 3</steps
echo "@@ done"
poweroff -f
