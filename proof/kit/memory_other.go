//go:build !linux

package kit

// MemoryDir returns "", because no such directory is known here.
func MemoryDir() string { return "" }
