//go:build !linux

package kit

// MemoryDir returns "": there is no such directory that is known.
func MemoryDir() string { return "" }
