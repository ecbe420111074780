//go:build !linux

package natstenure_test

func asVictim() {}
