package main

import "syscall"

// fileSystems are those of the kernel's linux/magic.h that don't suit a database.
var fileSystems = map[int64]volume{
	0x6969:     {fileSystem: "NFS", remote: true},
	0x517B:     {fileSystem: "SMB", remote: true},
	0xFE534D42: {fileSystem: "SMB", remote: true},
	0xFF534D42: {fileSystem: "CIFS", remote: true},
	0x01021997: {fileSystem: "9P", remote: true},
	0x00C36400: {fileSystem: "Ceph", remote: true},
	0x5346414F: {fileSystem: "AFS", remote: true},
	0x01161970: {fileSystem: "GFS2", remote: true},
	0x7461636F: {fileSystem: "OCFS2", remote: true},
	0x0BD00BD0: {fileSystem: "Lustre", remote: true},
	0x65735546: {fileSystem: "FUSE", remote: true}, // sshfs, s3fs, a shared folder of a virtual machine
	0x01021994: {fileSystem: "tmpfs", memory: true},
}

func volumeOf(path string) (volume, error) {
	var stat syscall.Statfs_t
	if err := syscall.Statfs(path, &stat); err != nil {
		return volume{}, err
	}
	v, known := fileSystems[int64(uint32(stat.Type))] // of other types on other architectures
	if !known {
		v.fileSystem = "a local disk"
	}
	v.free = int64(stat.Bavail) * int64(stat.Bsize)
	return v, nil
}
