// Package databases tests the stores of the root package on real servers and files: the
// contract, fenced transactions, watching, connections, poolers, rows of other programs.
package databases
