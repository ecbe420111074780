//go:build unix && !linux

package main

import "errors"

func mount(string, string) error { return errors.ErrUnsupported }
func unmount(string)             {}
