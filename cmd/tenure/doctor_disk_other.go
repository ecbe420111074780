//go:build unix && !linux

package main

import "errors"

func volumeOf(string) (volume, error) { return volume{}, errors.ErrUnsupported }
