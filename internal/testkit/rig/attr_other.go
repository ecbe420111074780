//go:build !linux

package rig

import "syscall"

func childAttr() *syscall.SysProcAttr { return nil }
