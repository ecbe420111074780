//go:build !linux

package testkit

// MemoryDir returns "", because no such directory is known here.
func MemoryDir() string { return "" }
