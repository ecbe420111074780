//go:build !linux

package kit

func memoryDir() string { return "" }
