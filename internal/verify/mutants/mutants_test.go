package main

import (
	"os"
	"path/filepath"
	"testing"
)

func TestEachMutantsOldTextOccursInItsFileOnce(t *testing.T) {
	for _, m := range mutants {
		source, err := os.ReadFile(filepath.Join("..", "..", "..", m.file))
		if err != nil {
			t.Error(err)
			continue
		}
		if _, err := m.apply(string(source)); err != nil {
			t.Errorf("%s: %v; adapt the list so that the mutant still does what its name says", m.name, err)
		}
	}
}
